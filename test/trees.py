# SPDX-License-Identifier: Apache-2.0
"""Random drafts, and what the ops of draft trees must make of them, by the oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from kdtree_spec import oracle
from kdtree_spec.tree import Tree, accept, build_tree, moves, top_k


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
        log_probs[rng.random((positions, k)) < 0.2] = rng.choice([-math.inf, np.nan])
    tokens = np.stack([rng.permutation(1000)[:k] for _ in range(positions)]) if positions else np.zeros((0, k), int)
    return {
        "log_probs": log_probs.astype(np.float32),
        "token_ids": tokens,
        "root": int(rng.integers(1000)),
        "width": int(rng.choice([1, 2, 3, 8, 16, 17, 32, 33, 64, 200])),
        "spine": bool(rng.integers(2)),
        "min_log_prob": float(rng.choice([-math.inf, -1.0, -4.0])),
    }


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, -77, dtype=dtype)


def built(batch: int, width: int) -> dict[str, torch.Tensor]:
    """What kdtree_build_tree writes, poisoned."""
    return {
        "tokens": poisoned(batch, width, dtype=torch.int64),
        "parents": poisoned(batch, width, dtype=torch.int32),
        "depths": poisoned(batch, width, dtype=torch.int32),
        "tree_mask": poisoned(batch * width, (width + 31) // 32, dtype=torch.int32),
        "next_token": poisoned(batch, width, dtype=torch.int64),
        "next_sibling": poisoned(batch, width, dtype=torch.int64),
        "counts": poisoned(batch, dtype=torch.int32),
    }


def walked(batch: int, limit: int) -> dict[str, torch.Tensor]:
    """What kdtree_accept writes, poisoned."""
    return {
        "paths": poisoned(batch, limit, dtype=torch.int32),
        "counts": poisoned(batch, dtype=torch.int32),
        "bonus": poisoned(batch, dtype=torch.int64),
    }


def drafts(case: dict[str, Any], batch: int) -> dict[str, torch.Tensor]:
    """The op's inputs for `batch` copies of a case."""
    repeated = {name: torch.from_numpy(case[name]).repeat(batch, 1, 1) for name in ("log_probs", "token_ids")}
    return repeated | {"roots": torch.full((batch,), case["root"])}


def random_draws(rng: np.random.Generator, tree: Tree, width: int) -> torch.Tensor:
    """[width], what a target may choose after each node: mostly a child of it, where there is one."""
    drawn = torch.zeros(width, dtype=torch.int64)
    for node in range(len(tree)):
        children = [tree.tokens[c] for c in tree.children(node)] or [0]
        drawn[node] = int(rng.choice(children) if rng.random() < 0.8 else rng.integers(1000))
    return drawn


def assert_equals_oracle(case: dict[str, Any], got: dict[str, torch.Tensor], request: int = 0) -> Tree:
    want = build_tree(**case)
    width, count = case["width"], len(want)
    padding = width - count
    first, sibling = want.links()
    assert got["counts"][request] == count
    assert got["tokens"][request].tolist() == want.tokens + [0] * padding
    assert got["parents"][request].tolist() == want.parents + [-1] * padding
    assert got["depths"][request].tolist() == want.depths + [0] * padding
    assert got["next_token"][request].tolist() == first + [-1] * padding
    assert got["next_sibling"][request].tolist() == sibling + [-1] * padding
    mask = np.eye(width, dtype=bool)
    mask[:count, :count] = want.mask()
    rows = got["tree_mask"][request * width : (request + 1) * width]
    assert (rows.numpy() == oracle.pack_tree_mask(mask)).all()
    return want


def assert_walk_equals_oracle(tree: Tree, drawn: torch.Tensor, got: dict[str, torch.Tensor], request: int = 0) -> None:
    path, bonus = accept(tree, drawn.tolist())
    limit = got["paths"].shape[1]
    assert got["paths"][request].tolist() == path + [-1] * (limit - len(path))
    assert (got["counts"][request], got["bonus"][request]) == (len(path), bonus)


def random_logits(rng: np.random.Generator, vocabularies: list[int]) -> tuple[torch.Tensor, int]:
    """Rows of logits, of any of the types, with ties, impossible tokens and rows in the worst order; and a top_k."""
    rows, vocabulary = int(rng.integers(1, 4)), int(rng.choice(vocabularies))
    kind = rng.integers(4)
    if kind == 0:  # many ties
        logits = rng.integers(-3, 4, (rows, vocabulary)).astype(np.float32)
    elif kind == 1:  # ascending: every tile is better than the ones before
        logits = np.sort(rng.normal(0, 5, (rows, vocabulary)).astype(np.float32))
    else:
        logits = rng.normal(0, 5, (rows, vocabulary)).astype(np.float32)
    if rng.random() < 0.5:
        logits[rng.random(logits.shape) < 0.3] = rng.choice([-math.inf, np.nan, 0.0, -0.0])
    if rng.random() < 0.1:
        logits[0] = -math.inf
    dtype = [torch.float32, torch.bfloat16, torch.float16][rng.integers(3)]
    return torch.from_numpy(logits).to(dtype), int(rng.choice([k for k in (1, 2, 7, 31, 256) if k <= vocabulary]))


def best_tokens(rows: int, k: int) -> dict[str, torch.Tensor]:
    """What kdtree_top_k writes, poisoned."""
    return {
        "log_probs": poisoned(rows, k, dtype=torch.float32),
        "token_ids": poisoned(rows, k, dtype=torch.int64),
        "normalisers": poisoned(rows, dtype=torch.float32),
    }


def assert_top_k_equals_oracle(logits: torch.Tensor, first_id: int, got: dict[str, torch.Tensor]) -> None:
    for row, given in enumerate(logits.float().cpu().numpy()):
        ids, log_probs, normaliser = top_k(given, got["token_ids"].shape[1])
        assert (got["token_ids"][row].cpu().numpy() == first_id + ids).all()
        np.testing.assert_allclose(got["log_probs"][row].cpu().numpy(), log_probs, rtol=2e-6, atol=2e-5)
        np.testing.assert_allclose(got["normalisers"][row].cpu().numpy(), normaliser, rtol=2e-6, atol=2e-5)


def random_move(rng: np.random.Generator, row_bytes: int) -> dict[str, Any]:
    """Caches of some layers, slots of some requests, and accepted paths."""
    layers, batch, width = int(rng.integers(1, 4)), int(rng.integers(1, 5)), int(rng.choice([1, 2, 8, 17, 40]))
    slots = batch * width + 5
    limit = int(rng.integers(1, width + 1))
    counts = rng.integers(1, limit + 1, batch)
    paths = np.full((batch, limit), -1)
    for b, count in enumerate(counts):
        paths[b, :count] = [0, *sorted(rng.permutation(np.arange(1, width))[: count - 1])]
    return {
        "caches": torch.from_numpy(rng.integers(0, 256, (layers, slots, row_bytes)).astype(np.uint8)),
        "slots": torch.from_numpy(rng.permutation(slots)[: batch * width].reshape(batch, width)),
        "paths": torch.from_numpy(paths.astype(np.int32)),
        "counts": torch.from_numpy(counts.astype(np.int32)),
    }


def moved(case: dict[str, Any]) -> torch.Tensor:
    """The caches as kdtree_move_rows must leave them, by the oracle's plan."""
    before = case["caches"]
    after = before.clone()
    for slots, path, count in zip(case["slots"], case["paths"], case["counts"], strict=True):
        for node, place in moves(path[:count].tolist()):
            after[:, slots[place]] = before[:, slots[node]]
    return after


def cache_addresses(caches: torch.Tensor) -> torch.Tensor:
    """[layers] int64, where they are."""
    return torch.tensor([layer.data_ptr() for layer in caches], device=caches.device)
