# SPDX-License-Identifier: Apache-2.0
"""The ops of draft trees on a GPU against the numpy oracle. Skipped where there is none.

KDTREE_CUDA_LIBRARY names another library than the one that `make kernels` builds.
"""

from __future__ import annotations

import os
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

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; none is here")

LIBRARY = Path(__file__).resolve().parents[2] / "sgl-kernel" / "python" / "sgl_kernel" / "kdtree_cuda.so"


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    if torch.cuda.is_available() and not hasattr(torch.ops.sgl_kernel, "kdtree_mla_plan"):
        torch.ops.load_library(os.environ.get("KDTREE_CUDA_LIBRARY", str(LIBRARY)))


@pytest.fixture(params=["fixed", "fresh"])
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    seed = 1 if request.param == "fixed" else int(np.random.default_rng().integers(2**31))
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def on_gpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in tensors.items()}


def on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def test_build_and_accept(rng: np.random.Generator) -> None:
    for _ in range(200):
        case = random_case(rng)
        width, batch = case["width"], int(rng.integers(1, 5))
        got = on_gpu(built(batch, width))
        torch.ops.sgl_kernel.kdtree_build_tree(
            **on_gpu(drafts(case, batch)), **got, spine=case["spine"], min_log_prob=case["min_log_prob"]
        )
        on_host = on_cpu(got)
        trees = [assert_equals_oracle(case, on_host, request) for request in range(batch)]
        drawn = torch.stack([random_draws(rng, tree, width) for tree in trees])
        walk = on_gpu(walked(batch, max(trees[0].depths) + 2))
        links = [got[name] for name in ("tokens", "next_token", "next_sibling")]
        torch.ops.sgl_kernel.kdtree_accept(*links, drawn.cuda(), **walk)
        for request in range(batch):
            assert_walk_equals_oracle(trees[request], drawn[request], on_cpu(walk), request)


def test_top_k(rng: np.random.Generator) -> None:
    for _ in range(100):
        logits, k = random_logits(rng, [1, 2, 300, 2048, 32_000, 163_840])
        got = on_gpu(best_tokens(len(logits), k))
        torch.ops.sgl_kernel.kdtree_top_k(logits.cuda(), 7, **got)
        assert_top_k_equals_oracle(logits, 7, got)


def test_move_rows(rng: np.random.Generator) -> None:
    for row_bytes in [16, 576, 1152, 2304] * 20:
        case = random_move(rng, row_bytes)
        caches = case["caches"].cuda()
        inputs = [case[name].cuda() for name in ("slots", "paths", "counts")]
        torch.ops.sgl_kernel.kdtree_move_rows(cache_addresses(caches), row_bytes, *inputs)
        assert torch.equal(caches.cpu(), moved(case))


def test_a_captured_round_follows_its_inputs(rng: np.random.Generator) -> None:
    """top_k, build and accept in one graph: replayed for other logits, they give other trees. No host sync."""
    width, positions, k = 32, 15, 31
    logits = torch.zeros(positions, 4096, device="cuda", dtype=torch.bfloat16)
    roots = torch.zeros(1, dtype=torch.int64, device="cuda")
    drawn = torch.zeros(1, width, dtype=torch.int64, device="cuda")
    best, tree, walk = on_gpu(best_tokens(positions, k)), on_gpu(built(1, width)), on_gpu(walked(1, 16))

    def launch() -> None:
        torch.ops.sgl_kernel.kdtree_top_k(logits, 0, **best)
        torch.ops.sgl_kernel.kdtree_build_tree(
            best["log_probs"][None], best["token_ids"][None], roots, False, -float("inf"), *tree.values()
        )
        links = [tree[name] for name in ("tokens", "next_token", "next_sibling")]
        torch.ops.sgl_kernel.kdtree_accept(*links, drawn, **walk)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for _ in range(5):
        logits.copy_(torch.from_numpy(rng.normal(0, 3, logits.shape)))
        drawn.copy_(torch.from_numpy(rng.integers(0, 4096, drawn.shape)))
        torch.cuda.set_sync_debug_mode("error")
        graph.replay()
        torch.cuda.set_sync_debug_mode("default")
        assert_top_k_equals_oracle(logits, 0, best)
        case = {"log_probs": best["log_probs"].cpu().numpy(), "token_ids": best["token_ids"].cpu().numpy()}
        case |= {"root": 0, "width": width, "spine": False, "min_log_prob": -float("inf")}
        oracle_tree = assert_equals_oracle(case, on_cpu(tree))
        assert_walk_equals_oracle(oracle_tree, drawn[0].cpu(), on_cpu(walk))
