# SPDX-License-Identifier: Apache-2.0
"""Lossless sampling: the joint distribution of the first three tokens is that of plain sampling.

The distribution is computed from the reference model, so plain sampling is tried against it too.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from test_ddtree import RUNNING, ddtree

from conftest import SMALL
from prompts import held_out_tokens
from reference import ReferenceModel
from server import Server, request, running

ALPHA = 0.001
LENGTH = 3


@torch.no_grad()
def next_token(reference: ReferenceModel, prefixes: list[list[int]], sampling: dict[str, float]) -> np.ndarray:
    """[prefixes, vocab] float64, the probabilities that are drawn from."""
    logits = reference(torch.tensor(prefixes))[:, -1].double().numpy()
    probs = torch.softmax(torch.from_numpy(logits / sampling["temperature"]), -1).numpy()
    order = np.argsort(-probs, axis=-1, kind="stable")
    ranked = np.take_along_axis(probs, order, -1)
    keep = np.arange(probs.shape[-1]) < sampling.get("top_k", probs.shape[-1])
    keep = keep & (np.cumsum(ranked, -1) - ranked <= sampling.get("top_p", 1.0))
    kept = np.zeros_like(probs)
    np.put_along_axis(kept, order, np.where(keep, ranked, 0), -1)
    return kept / kept.sum(-1, keepdims=True)


def likely_outcomes(
    reference: ReferenceModel, prompt: list[int], sampling: dict[str, float], least: float
) -> dict[tuple[int, ...], float]:
    """The outcomes of LENGTH tokens whose probability is at least `least`, and their probabilities."""
    paths: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        grown: dict[tuple[int, ...], float] = {}
        for part in np.array_split(np.arange(len(paths)), math.ceil(len(paths) / 64)):
            some = [list(paths.items())[i] for i in part]
            for (path, p), row in zip(
                some, next_token(reference, [prompt + list(path) for path, _ in some], sampling), strict=True
            ):
                grown |= {(*path, int(t)): p * row[t] for t in np.flatnonzero(p * row >= least)}
        paths = grown
    return paths


def draw(server: Server, prompt: list[int], count: int, sampling: dict[str, Any]) -> Counter[tuple[int, ...]]:
    outcomes: Counter[tuple[int, ...]] = Counter()
    params = {"max_new_tokens": LENGTH, "ignore_eos": True, **sampling}
    while outcomes.total() < count:
        body = {"input_ids": [prompt] * min(250, count - outcomes.total()), "sampling_params": params}
        outcomes.update(tuple(r["output_ids"]) for r in request(f"{server.url}/generate", body, timeout=600))
    return outcomes


def p_value(seen: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """Of Pearson's chi-square test, and its number of bins; what is not in `expected` is one bin."""
    count = seen.total()
    rest_seen = count - sum(seen[o] for o in expected)
    rest = max(count * (1 - sum(expected.values())), 1e-9)
    statistic = sum((seen[o] - count * p) ** 2 / (count * p) for o, p in expected.items())
    bins = len(expected)
    if rest >= 5:
        statistic, bins = statistic + (rest_seen - rest) ** 2 / rest, bins + 1
    else:
        assert rest_seen <= 5 + 10 * rest, "outcomes that cannot be"
    return float(chi2.sf(statistic, bins - 1)), bins


def check(
    servers: dict[str, Server],
    reference: ReferenceModel,
    prompt: list[int],
    count: int,
    sampling: dict[str, float],
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = likely_outcomes(reference, prompt, sampling, least=5 / count)
    for name, server in servers.items():
        p, bins = p_value(draw(server, prompt, count, sampling), expected)
        with capsys.disabled():
            print(f"\n{name} {sampling}: p = {p:.3f}, {bins} outcomes, {count} samples")
        assert p > ALPHA, name


def test_three_tokens_of_2000_samples(
    tmp_path: Path, reference: ReferenceModel, capsys: pytest.CaptureFixture[str]
) -> None:
    with Server(tmp_path / "log", *SMALL, *RUNNING, *ddtree(8)) as trees:
        sampling = {"temperature": 0.7, "top_p": 0.9}
        check({"DDTREE": trees}, reference, held_out_tokens()[2][:40], 2000, sampling, capsys)


@pytest.mark.long
def test_three_tokens_of_20000_samples(
    tmp_path: Path, reference: ReferenceModel, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = {
        "DDTREE": Server(tmp_path / "trees", *SMALL, *RUNNING, *ddtree(8)),
        "plain": Server(tmp_path / "plain", *SMALL, *RUNNING),
    }
    with running(servers):
        for sampling in ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0, "top_k": 20}):
            check(servers, reference, held_out_tokens()[2][:40], 20_000, sampling, capsys)
