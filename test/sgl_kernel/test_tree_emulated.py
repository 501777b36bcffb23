# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels of draft trees, run on the CPU by an emulator (emulator/emulator.h), against the oracle."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from trees import (
    assert_equals_oracle,
    assert_top_k_equals_oracle,
    assert_walk_equals_oracle,
    best_tokens,
    built,
    cache_addresses,
    drafts,
    moved,
    random_case,
    random_draws,
    random_logits,
    random_move,
    walked,
)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BATCH = 2


def pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names]


def sizes(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_int32) for name in names]


class BuildParams(ctypes.Structure):
    """BuildParams of tree_params.h."""

    _fields_ = [
        *pointers("log_probs", "token_ids", "roots"),
        ("spine", ctypes.c_bool),
        ("min_log_prob", ctypes.c_double),
        *pointers("tokens", "parents", "depths", "tree_mask", "next_token", "next_sibling", "counts"),
        *sizes("batch", "positions", "top_k", "width", "words"),
    ]


class AcceptParams(ctypes.Structure):
    """AcceptParams of tree_params.h."""

    _fields_ = [
        *pointers("tokens", "next_token", "next_sibling", "drawn", "paths", "counts", "bonus"),
        *sizes("batch", "width", "limit"),
    ]


class TopKParams(ctypes.Structure):
    """TopKParams of tree_params.h."""

    _fields_ = [
        *pointers("logits"),
        ("first_id", ctypes.c_int64),
        *pointers("log_probs", "token_ids", "normalisers"),
        *sizes("rows", "vocabulary", "top_k"),
    ]


class MoveParams(ctypes.Structure):
    """MoveParams of tree_params.h."""

    _fields_ = [
        *pointers("caches", "slots", "paths", "counts"),
        *sizes("layers", "batch", "width", "limit", "row_bytes"),
    ]


def addresses(*groups: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for group in groups for name, tensor in group.items()}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("emulator") / "emulate_tree.so"
    folders = ROOT / "sgl-kernel" / "csrc" / "speculative", ROOT / "kdtree" / "include", HERE / "emulator"
    # fmt: off
    subprocess.run(["c++", "-std=c++20", "-O2", "-shared", "-fPIC", *(f"-I{folder}" for folder in folders),
                    str(HERE / "emulator" / "emulate_tree.cpp"), "-o", str(path)], check=True)
    # fmt: on
    loaded = ctypes.CDLL(str(path))
    for function in (loaded.run_build_tree, loaded.run_accept, loaded.run_move_rows):
        function.restype = ctypes.c_char_p
        function.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    loaded.run_top_k.restype = ctypes.c_char_p
    loaded.run_top_k.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64]
    return loaded


@pytest.mark.parametrize("seed", [1, None])
def test_kernels_equal_the_oracle_on_random_cases(library: ctypes.CDLL, seed: int | None) -> None:
    seed = int(np.random.default_rng().integers(2**31)) if seed is None else seed
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for i in range(300):
        case = random_case(rng)
        width = case["width"]
        inputs, got = drafts(case, BATCH), built(BATCH, width)
        positions, top_k = case["log_probs"].shape
        params = BuildParams(
            **addresses(inputs, got),
            spine=case["spine"],
            min_log_prob=case["min_log_prob"],
            batch=BATCH,
            positions=positions,
            top_k=top_k,
            width=width,
            words=(width + 31) // 32,
        )
        assert library.run_build_tree(ctypes.byref(params), i) is None
        trees = [assert_equals_oracle(case, got, request) for request in range(BATCH)]
        drawn = torch.stack([random_draws(rng, tree, width) for tree in trees])
        limit = max(trees[0].depths) + 2
        walk = walked(BATCH, limit)
        links = {name: got[name] for name in ("tokens", "next_token", "next_sibling")}
        params = AcceptParams(**addresses(links, {"drawn": drawn}, walk), batch=BATCH, width=width, limit=limit)
        assert library.run_accept(ctypes.byref(params), i) is None
        for request in range(BATCH):
            assert_walk_equals_oracle(trees[request], drawn[request], walk, request)


@pytest.mark.parametrize("seed", [1, None])
def test_top_k_equals_the_oracle(library: ctypes.CDLL, seed: int | None) -> None:
    seed = int(np.random.default_rng().integers(2**31)) if seed is None else seed
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for i in range(20):
        logits, k = random_logits(rng, [1, 300, 2048, 20_000])
        got = best_tokens(len(logits), k)
        params = TopKParams(
            **addresses({"logits": logits}, got), first_id=7, rows=len(logits), vocabulary=logits.shape[1], top_k=k
        )
        kind = [torch.float32, torch.bfloat16, torch.float16].index(logits.dtype)
        assert library.run_top_k(kind, ctypes.byref(params), i) is None
        assert_top_k_equals_oracle(logits, 7, got)


def test_accepted_rows_move_to_the_front(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng()
    for i, row_bytes in enumerate([16, 1152, 2304] * 10):
        case = random_move(rng, row_bytes)
        want = moved(case)
        layers = cache_addresses(case["caches"])
        inputs = {name: case[name] for name in ("slots", "paths", "counts")}
        batch, width = case["slots"].shape
        params = MoveParams(
            **addresses({"caches": layers}, inputs),
            layers=len(layers),
            batch=batch,
            width=width,
            limit=case["paths"].shape[1],
            row_bytes=row_bytes,
        )
        assert library.run_move_rows(ctypes.byref(params), i) is None
        assert torch.equal(case["caches"], want)
