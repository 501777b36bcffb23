# SPDX-License-Identifier: Apache-2.0
"""Draft trees: the oracle by hand and by brute force, then the C++ headers, through the CPU ops, against the oracle."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sgl_kernel  # noqa: F401  (registers torch.ops.sgl_kernel)
import torch

from kdtree_spec.tree import Tree, accept, build_tree, moves
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

CASES = 10_000
NONE = -math.inf


def table(rows: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of given probabilities, and tokens 10 * position + rank."""
    with np.errstate(divide="ignore"):
        log_probs = np.log(np.array(rows, np.float32))
    return log_probs, np.arange(len(rows))[:, None] * 10 + np.arange(len(rows[0]))


def test_hand_made_tree() -> None:
    log_probs, tokens = table([[0.5, 0.25, 0.125], [0.5, 0.375, 0.0625]])
    tree = build_tree(log_probs, tokens, root=7, width=6)
    # Ties: at 0.25 the ranks 0 0 come before 1, at 0.125 the ranks 1 0 before 2.
    assert tree.tokens == [7, 0, 10, 1, 11, 10]
    assert tree.parents == [-1, 0, 1, 0, 1, 3]
    assert tree.links() == ([1, 2, -1, 5, -1, -1], [-1, 3, 4, -1, -1, -1])
    np.testing.assert_allclose(np.exp(tree.scores), [1, 0.5, 0.25, 0.25, 0.1875, 0.125], rtol=1e-6)


def test_ties_take_the_smaller_rank_tuple() -> None:
    log_probs = np.full((2, 3), -1, np.float32)
    tree = build_tree(log_probs, np.arange(6).reshape(2, 3), 9, 7)
    assert tree.ranks == [(), (0,), (1,), (2,), (0, 0), (0, 1), (0, 2)]
    log_probs = np.zeros((2, 2), np.float32)
    tree = build_tree(log_probs, np.arange(4).reshape(2, 2), 9, 7)
    assert tree.ranks == [(), (0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]


def test_spine_first_and_threshold() -> None:
    log_probs, tokens = table([[0.5, 0.4], [0.5, 0.3], [0.01, 0.005]])
    tree = build_tree(log_probs, tokens, 7, 6, spine=True)
    assert tree.tokens == [7, 0, 10, 20, 1, 10]
    short = build_tree(log_probs, tokens, 7, 6, spine=True, min_log_prob=math.log(0.3))
    assert short.tokens == [7, 0, 10, 20, 1]
    assert build_tree(log_probs, tokens, 7, 6, min_log_prob=math.log(0.3)).tokens == [7, 0, 1]


def test_what_cannot_be_is_never_taken() -> None:
    log_probs, tokens = table([[1.0, 0.0], [1.0, 0.0]])
    assert build_tree(log_probs, tokens, 7, 9).tokens == [7, 0, 10]
    assert build_tree(log_probs, tokens, 7, 9, spine=True).tokens == [7, 0, 10]
    assert build_tree(np.full((2, 2), NONE, np.float32), tokens, 7, 9, spine=True).tokens == [7]


def test_walk_and_moves() -> None:
    tree = Tree(tokens=[7, 3, 4, 3, 5], parents=[-1, 0, 0, 2, 3], depths=[0, 1, 1, 2, 3])
    assert tree.links() == ([1, -1, 3, 4, -1], [-1, 2, -1, -1, -1])
    assert accept(tree, [4, 0, 3, 9, 0]) == ([0, 2, 3], 9)
    assert accept(tree, [8, 0, 0, 0, 0]) == ([0], 8)
    assert moves([0, 2, 3]) == [(2, 1), (3, 2)]
    assert moves([0, 1, 4]) == [(4, 2)]
    assert moves([0, 1, 2]) == []


@pytest.mark.parametrize("seed", range(30))
def test_heap_finds_the_best_paths(seed: int) -> None:
    """All paths, sorted: the tree is the first of them."""
    rng = np.random.default_rng(seed)
    positions, k, width = int(rng.integers(1, 5)), int(rng.integers(1, 5)), int(rng.integers(1, 40))
    log_probs = -np.sort(rng.exponential(size=(positions, k)).astype(np.float32), axis=1)
    paths = [p for n in range(1, positions + 1) for p in itertools.product(range(k), repeat=n)]
    score = {p: sum(float(log_probs[i, r]) for i, r in enumerate(p)) for p in paths}
    best = sorted(paths, key=lambda p: (-score[p], p))
    tree = build_tree(log_probs, np.zeros((positions, k), int), 0, width)
    assert tree.ranks == [(), *best[: width - 1]]


def build_with_op(case: dict[str, Any], batch: int = 1) -> dict[str, torch.Tensor]:
    """The op's outputs for `batch` copies of a case."""
    out = built(batch, case["width"])
    torch.ops.sgl_kernel.kdtree_build_tree(
        **drafts(case, batch), **out, **{n: case[n] for n in ("spine", "min_log_prob")}
    )
    return out


def accept_with_op(tree: dict[str, torch.Tensor], drawn: torch.Tensor, limit: int) -> dict[str, torch.Tensor]:
    out = walked(len(drawn), limit)
    torch.ops.sgl_kernel.kdtree_accept(tree["tokens"], tree["next_token"], tree["next_sibling"], drawn, **out)
    return out


def test_build_and_accept_equal_the_oracle_on_random_cases() -> None:
    seed = int(np.random.default_rng().integers(2**31))
    print(f"seed {seed}")
    nodes = 0
    for rng in (np.random.default_rng(1), np.random.default_rng(seed)):
        for _ in range(CASES // 2):
            case = random_case(rng)
            got = build_with_op(case)
            tree = assert_equals_oracle(case, got)
            nodes += len(tree)
            drawn = random_draws(rng, tree, case["width"])
            assert_walk_equals_oracle(tree, drawn, accept_with_op(got, drawn[None], max(tree.depths) + 2))
    assert nodes > 10 * CASES  # the cases are no trifles


def test_batches_and_a_limit_of_the_walk() -> None:
    case = random_case(np.random.default_rng(5)) | {"width": 40, "spine": True}
    got = build_with_op(case, batch=3)
    trees = [assert_equals_oracle(case, got, request) for request in range(3)]
    tree = trees[1]
    drawn = torch.zeros(3, 40, dtype=torch.int64)
    for node in range(len(tree)):
        children = tree.children(node)
        drawn[1, node] = tree.tokens[children[0]] if children else 1234
    walk = accept_with_op(got, drawn, limit=2)
    assert walk["paths"][1].tolist() == [0, 1] and walk["counts"][1] == 2 and walk["bonus"][1] == drawn[1, 1]


def test_top_k_equals_the_oracle() -> None:
    seed = int(np.random.default_rng().integers(2**31))
    print(f"seed {seed}")
    for rng in (np.random.default_rng(1), np.random.default_rng(seed)):
        for _ in range(100):
            logits, k = random_logits(rng, [1, 2, 50, 2048, 5000])
            out = best_tokens(len(logits), k)
            torch.ops.sgl_kernel.kdtree_top_k(logits, 4000, **out)
            assert_top_k_equals_oracle(logits, 4000, out)


def test_accepted_rows_move_to_the_front() -> None:
    seed = int(np.random.default_rng().integers(2**31))
    print(f"seed {seed}")
    for rng in (np.random.default_rng(1), np.random.default_rng(seed)):
        for _ in range(100):
            case = random_move(rng, 48)
            want = moved(case)
            torch.ops.sgl_kernel.kdtree_move_rows(
                cache_addresses(case["caches"]), 48, case["slots"], case["paths"], case["counts"]
            )
            assert torch.equal(case["caches"], want)


def test_bad_arguments_of_top_k_and_move_rows_name_themselves() -> None:
    logits = torch.zeros(2, 10)
    with pytest.raises(RuntimeError, match=r"log_probs must be \[2, 1 to 10\], is float32 \[2, 11\]"):
        torch.ops.sgl_kernel.kdtree_top_k(logits, 0, **best_tokens(2, 11))
    with pytest.raises(RuntimeError, match="logits must be contiguous float32, bfloat16 or float16"):
        torch.ops.sgl_kernel.kdtree_top_k(logits.double(), 0, **best_tokens(2, 3))
    case = random_move(np.random.default_rng(0), 48)
    addresses = cache_addresses(case["caches"])
    with pytest.raises(RuntimeError, match="row_bytes must be a multiple of 16, is 40"):
        torch.ops.sgl_kernel.kdtree_move_rows(addresses, 40, case["slots"], case["paths"], case["counts"])
    with pytest.raises(RuntimeError, match="counts must be contiguous int32"):
        torch.ops.sgl_kernel.kdtree_move_rows(addresses, 48, case["slots"], case["paths"], case["counts"].long())


def test_bad_arguments_name_themselves() -> None:
    case = random_case(np.random.default_rng(0)) | {"width": 8}
    with pytest.raises(RuntimeError, match=r"width of 1 to 256.*\[1, 300\]"):
        build_with_op(case | {"width": 300})
    with pytest.raises(RuntimeError, match="log_probs must be contiguous float32"):
        build_with_op(case | {"log_probs": case["log_probs"].astype(np.float64)})
    with pytest.raises(RuntimeError, match="min_log_prob is NaN"):
        build_with_op(case | {"min_log_prob": math.nan})
    got = build_with_op(case)
    got["next_token"] += 100
    with pytest.raises(IndexError, match="-1 to 7"):
        accept_with_op(got, got["tokens"], limit=4)


def test_picture_in_the_readme_is_what_the_command_draws(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kdtree_spec", "draw", tmp_path / "tree.svg"]
    subprocess.run(command, check=True, capture_output=True)
    kept = Path(__file__).resolve().parents[2] / "kdtree" / "tree.svg"
    assert (tmp_path / "tree.svg").read_text() == kept.read_text()
