# SPDX-License-Identifier: Apache-2.0
"""kdtree_mla on a GPU against upstream's Triton backend: the same greedy tokens, plain, with NGRAM's trees, with a
DFlash chain and with DDTREE, with CUDA graphs and without. Skipped where there is no GPU.

In bf16 two backends, and two batch shapes, may choose differently where the two best tokens are as good as tied. Where
outputs part, the gap between the two best log-probabilities is printed and must be below NOISE.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import random_mla
from conftest import log_lines, outputs_of
from prompts import held_out_prompts
from server import TINY_DRAFTER, TINY_MODEL, Server, request, running

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; none is here")

NOISE = 0.125  # nat, of a gap between two log-probabilities in bf16
TOKENS = 64
KDTREE = ("--attention-backend", "kdtree_mla")
TRITON = ("--attention-backend", "triton")
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "16")
# Several servers share the GPU; each takes what its pool needs.
COMMON = ("--max-total-tokens", "60000", "--max-running-requests", "16", "--mem-fraction-static", "0.7")
SERVERS = {
    "triton": (TRITON, ()),
    "triton, NGRAM": (TRITON, NGRAM),
    "kdtree_mla": (KDTREE, ()),
    "kdtree_mla, NGRAM": (KDTREE, NGRAM),
    "kdtree_mla, NGRAM, eager": (KDTREE, (*NGRAM, "--disable-cuda-graph")),
}
DRAFTER = ("--speculative-draft-model-path", str(TINY_DRAFTER), "--speculative-draft-attention-backend", "triton")
DDTREE = ("--speculative-algorithm", "DDTREE", *DRAFTER)
# For the model that has a drafter.
WITH_DRAFTER = {
    "kdtree_mla, DFLASH": (KDTREE, ("--speculative-algorithm", "DFLASH", *DRAFTER)),
    "kdtree_mla, DDTREE": (KDTREE, (*DDTREE, "--speculative-num-draft-tokens", "32")),
    "kdtree_mla, DDTREE, eager": (KDTREE, (*DDTREE, "--speculative-num-draft-tokens", "32", "--disable-cuda-graph")),
    "kdtree_mla, DDTREE, pages": (
        KDTREE,
        (*DDTREE, "--speculative-num-draft-tokens", "8", "--page-size", "64", "--disable-overlap-schedule"),
    ),
}


@pytest.fixture(scope="module", params=["tiny", "wide"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "tiny":
        return TINY_MODEL
    folder = tmp_path_factory.mktemp("wide")
    random_mla.write(folder)
    return folder


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    folder = tmp_path_factory.mktemp("servers")
    wanted = SERVERS | (WITH_DRAFTER if model == TINY_MODEL else {})
    made = {
        name: Server(folder / f"{i}", *COMMON, *flags, model=model, dtype="bfloat16", backend=backend, device="cuda")
        for i, (name, (backend, flags)) in enumerate(wanted.items())
    }
    with running(made, timeout=400):
        yield made


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    """Short and long, some the beginning of others."""
    if model == TINY_MODEL:
        return [*held_out_prompts(20), *held_out_prompts(8, 500, 3000)]
    rng = random.Random(0)
    return [[rng.randrange(6, 32000) for _ in range(n)] for n in (1, 2, 17, 60, 64, 65, 200, 777, 1500, 4000)]


@pytest.fixture(scope="module")
def outputs(servers: dict[str, Server], prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    """Of each server, one request at a time: the batch shapes are the same everywhere."""
    return {name: outputs_of(server, prompts, TOKENS, in_flight=1) for name, server in servers.items()}


def gap_of_best_two(server: Server, tokens: list[int]) -> float:
    params = {"max_new_tokens": 1, "temperature": 0}
    body = {"input_ids": tokens, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    best, second = request(f"{server.url}/generate", body)["meta_info"]["output_top_logprobs"][0]
    return best[0] - second[0]


def assert_equal_up_to_ties(
    server: Server, prompts: list[list[int]], got: list[list[int]], want: list[list[int]], what: str
) -> None:
    gaps = []
    for prompt, one, other in zip(prompts, got, want, strict=True):
        assert len(one) == len(other) == TOKENS
        parted = next((i for i in range(TOKENS) if one[i] != other[i]), None)
        if parted is not None:
            gaps.append(gap_of_best_two(server, prompt + other[:parted]))
    shown = ", ".join(f"{gap:.3f}" for gap in sorted(gaps)) or "none"
    print(f"\n{what}: {len(gaps)} of {len(prompts)} outputs part; gaps of the two best there, in nat: {shown}")
    assert all(gap < NOISE for gap in gaps)


@pytest.mark.parametrize("name", [name for name in (*SERVERS, *WITH_DRAFTER) if name != "triton"])
def test_same_tokens_as_triton(
    name: str,
    servers: dict[str, Server],
    prompts: list[list[int]],
    outputs: dict[str, list[list[int]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    if name not in servers:
        pytest.skip("this model has no drafter")
    with capsys.disabled():
        assert_equal_up_to_ties(servers["triton"], prompts, outputs[name], outputs["triton"], f"triton and {name}")


def test_graphs_and_eager_give_the_same_tokens(outputs: dict[str, list[list[int]]]) -> None:
    for name in ("kdtree_mla, NGRAM", "kdtree_mla, DDTREE"):
        assert name not in outputs or outputs[name] == outputs[f"{name}, eager"], name


@pytest.mark.parametrize("name", ["kdtree_mla", "kdtree_mla, NGRAM", "kdtree_mla, DFLASH", "kdtree_mla, DDTREE"])
def test_batches_give_the_same_tokens(
    name: str,
    servers: dict[str, Server],
    prompts: list[list[int]],
    outputs: dict[str, list[list[int]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    if name not in servers:
        pytest.skip("this model has no drafter")
    got = outputs_of(servers[name], prompts, TOKENS, in_flight=11)
    with capsys.disabled():
        assert_equal_up_to_ties(servers["triton"], prompts, got, outputs["triton"], f"{name}, 11 in flight")


def test_trees_are_verified_and_accepted(servers: dict[str, Server], model: Path) -> None:
    if model != TINY_MODEL:
        pytest.skip("random weights predict nothing")
    for name in ("kdtree_mla, NGRAM", "kdtree_mla, DFLASH", "kdtree_mla, DDTREE"):
        replies = [
            servers[name].generate(p, TOKENS, ignore_eos=True)["meta_info"] for p in held_out_prompts(8, 100, 400)
        ]
        rate = sum(r["completion_tokens"] for r in replies) / sum(r["spec_verify_ct"] for r in replies)
        print(f"{name}: {rate:.2f} tokens a round")
        assert rate > 1.3, name


def test_start_line_names_the_kernel(servers: dict[str, Server]) -> None:
    for name, server in servers.items():
        lines = log_lines(server.log, "kdtree_mla: rank=0/1")
        assert len(lines) == (0 if name.startswith("triton") else 1)
        assert all("device=cuda kernel=sm_" in line for line in lines)
