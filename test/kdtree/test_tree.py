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

from kdtree_spec import oracle
from kdtree_spec.tree import Tree, accept, build_tree, moves

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


def random_case(rng: np.random.Generator) -> dict[str, Any]:
    """Drafted positions with ties, impossible tokens, single candidates, and budgets beyond what exists."""
    positions, k = int(rng.integers(0, 16)), int(rng.choice([1, 2, 3, 8, 31]))
    kind = rng.integers(4)
    if kind == 0:  # many equal sums
        log_probs = -rng.integers(0, 3, (positions, k)).astype(np.float32)
    elif kind == 1:  # a drafter's: one token takes most
        log_probs = np.log(rng.dirichlet(np.full(k, 0.1), positions).astype(np.float32).reshape(positions, k) + 1e-30)
    else:
        log_probs = -rng.exponential(2, (positions, k)).astype(np.float32)
    log_probs = -np.sort(-log_probs, axis=1)
    if rng.random() < 0.3:
        log_probs[rng.random((positions, k)) < 0.2] = rng.choice([NONE, np.nan])
    tokens = np.stack([rng.permutation(1000)[:k] for _ in range(positions)]) if positions else np.zeros((0, k), int)
    return {
        "log_probs": log_probs.astype(np.float32),
        "token_ids": tokens,
        "root": int(rng.integers(1000)),
        "width": int(rng.choice([1, 2, 3, 8, 16, 17, 32, 33, 64, 200])),
        "spine": bool(rng.integers(2)),
        "min_log_prob": float(rng.choice([NONE, -1.0, -4.0])),
    }


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, -77, dtype=dtype)


def build_with_op(case: dict[str, Any], batch: int = 1) -> dict[str, torch.Tensor]:
    """The op's outputs for `batch` copies of a case."""
    width = case["width"]
    out = {name: poisoned(batch, width, dtype=torch.int64) for name in ("tokens", "next_token", "next_sibling")}
    out |= {name: poisoned(batch, width, dtype=torch.int32) for name in ("parents", "depths", "ranks")}
    out["tree_mask"] = poisoned(batch * width, (width + 31) // 32, dtype=torch.int32)
    out["counts"] = poisoned(batch, dtype=torch.int32)
    log_probs, token_ids = (torch.from_numpy(case[name]) for name in ("log_probs", "token_ids"))
    torch.ops.sgl_kernel.kdtree_build_tree(
        log_probs.repeat(batch, 1, 1),
        token_ids.repeat(batch, 1, 1),
        torch.full((batch,), case["root"]),
        case["spine"],
        case["min_log_prob"],
        **out,
    )
    return out


def assert_equals_oracle(case: dict[str, Any], got: dict[str, torch.Tensor], request: int = 0) -> Tree:
    want = build_tree(**case)
    width, count = case["width"], len(want)
    padding = width - count
    first, sibling = want.links()
    assert got["counts"][request] == count
    assert got["tokens"][request].tolist() == want.tokens + [0] * padding
    assert got["parents"][request].tolist() == want.parents + [-1] * padding
    assert got["depths"][request].tolist() == want.depths + [0] * padding
    assert got["ranks"][request].tolist() == [r[-1] if r else 0 for r in want.ranks] + [0] * padding
    assert got["next_token"][request].tolist() == first + [-1] * padding
    assert got["next_sibling"][request].tolist() == sibling + [-1] * padding
    mask = np.eye(width, dtype=bool)
    mask[:count, :count] = want.mask()
    rows = got["tree_mask"][request * width : (request + 1) * width]
    assert (rows.numpy() == oracle.pack_tree_mask(mask)).all()
    return want


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
            # What the target draws: mostly a child of the node, where there is one.
            drawn = np.zeros(case["width"], np.int64)
            for node in range(len(tree)):
                children = [tree.tokens[c] for c in tree.children(node)] or [0]
                drawn[node] = rng.choice(children) if rng.random() < 0.8 else rng.integers(1000)
            assert_walk_equals_oracle(tree, got, drawn)
    assert nodes > 10 * CASES  # the cases are no trifles


def assert_walk_equals_oracle(tree: Tree, got: dict[str, torch.Tensor], drawn: np.ndarray) -> None:
    want, bonus_token = accept(tree, drawn)
    limit = max(tree.depths) + 2
    paths, counts = poisoned(1, limit, dtype=torch.int32), poisoned(1, dtype=torch.int32)
    bonus = poisoned(1, dtype=torch.int64)
    links = got["next_token"], got["next_sibling"]
    torch.ops.sgl_kernel.kdtree_accept(got["tokens"], *links, torch.from_numpy(drawn)[None], paths, counts, bonus)
    assert paths[0].tolist() == want + [-1] * (limit - len(want))
    assert (counts.item(), bonus.item()) == (len(want), bonus_token)


def test_batches_and_a_limit_of_the_walk() -> None:
    case = random_case(np.random.default_rng(5)) | {"width": 40, "spine": True}
    got = build_with_op(case, batch=3)
    trees = [assert_equals_oracle(case, got, request) for request in range(3)]
    tree = trees[1]
    drawn = torch.zeros(3, 40, dtype=torch.int64)
    for node in range(len(tree)):
        children = tree.children(node)
        drawn[1, node] = tree.tokens[children[0]] if children else 1234
    paths, counts = poisoned(3, 2, dtype=torch.int32), poisoned(3, dtype=torch.int32)
    bonus = poisoned(3, dtype=torch.int64)
    links = got["next_token"], got["next_sibling"]
    torch.ops.sgl_kernel.kdtree_accept(got["tokens"], *links, drawn, paths, counts, bonus)
    assert paths[1].tolist() == [0, 1] and counts[1] == 2 and bonus[1] == drawn[1, 1]


def test_bad_arguments_name_themselves() -> None:
    case = random_case(np.random.default_rng(0)) | {"width": 8}
    with pytest.raises(RuntimeError, match=r"width of 1 to 256.*\[1, 300\]"):
        build_with_op(case | {"width": 300})
    with pytest.raises(RuntimeError, match="log_probs must be contiguous float32"):
        build_with_op(case | {"log_probs": case["log_probs"].astype(np.float64)})
    with pytest.raises(RuntimeError, match="min_log_prob is NaN"):
        build_with_op(case | {"min_log_prob": math.nan})
    got = build_with_op(case)
    links = got["next_token"] + 100, got["next_sibling"]
    out = poisoned(1, 4, dtype=torch.int32), poisoned(1, dtype=torch.int32), poisoned(1, dtype=torch.int64)
    with pytest.raises(IndexError, match="-1 to 7"):
        torch.ops.sgl_kernel.kdtree_accept(got["tokens"], *links, got["tokens"], *out)


def test_picture_in_the_readme_is_what_the_command_draws(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kdtree_spec", "draw", tmp_path / "tree.svg"]
    subprocess.run(command, check=True, capture_output=True)
    kept = Path(__file__).resolve().parents[2] / "kdtree" / "tree.svg"
    assert (tmp_path / "tree.svg").read_text() == kept.read_text()
