# SPDX-License-Identifier: Apache-2.0
"""Draft trees, slow and obvious: the oracle of the C++ headers and of the device ops.

DDTree (Ringel & Romano, arXiv 2604.12989): a block-diffusion drafter gives independent distributions of the tokens
after the last committed one, a position each. The product of a path's probabilities is a lower or equal number at every
further node, so the best tree of a given size is the best paths of that number, found with a heap.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kdtree_spec.oracle import BoolArray, ancestor_mask


@dataclass
class Tree:
    """Nodes in the order of their choice; node 0 is the root, the last committed token, whose parent is -1.

    A parent's index is below its children's; a node's depth is its distance from the root. ranks: a node's rank among
    its position's tokens, from the root down. scores: natural logarithm of the path's probability.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    ranks: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    scores: list[float] = field(default_factory=lambda: [0.0])

    def __len__(self) -> int:
        return len(self.tokens)

    def mask(self) -> BoolArray:
        """[nodes, nodes]: a node sees itself and its ancestors."""
        return ancestor_mask(self.parents)

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def links(self) -> tuple[list[int], list[int]]:
        """SGLang's form of the tree: a node's first child, and its parent's next child; -1 where there is none."""
        first, sibling = [-1] * len(self), [-1] * len(self)
        for node in range(len(self)):
            children = self.children(node)
            if children:
                first[node] = children[0]
            for one, next_one in itertools.pairwise(children):
                sibling[one] = next_one
        return first, sibling


def build_tree(
    log_probs: npt.NDArray[np.float32],
    token_ids: npt.NDArray[np.integer],
    root: int,
    width: int,
    spine: bool = False,
    min_log_prob: float = -math.inf,
) -> Tree:
    """The best-first tree of at most `width` nodes, root included (Algorithm 1).

    log_probs: [positions, k], of the k likeliest tokens of each position, likeliest first; token_ids: the same shape.
    A path's score is the sum of its log-probabilities, in float64 from the root down; of equal scores the
    lexicographically smaller tuple of ranks comes first. spine: the path of the likeliest tokens goes in before all
    else. min_log_prob: the search ends at the first node that scores less; the spine is exempt. A token of
    log-probability -inf (or NaN) is never taken, nor are those after it at its position.
    """
    positions, k = log_probs.shape
    tree = Tree([int(root)])
    heap: list[tuple[float, tuple[int, ...], int]] = []  # negated score, ranks, parent

    def offer(parent: int, rank: int) -> None:
        position = tree.depths[parent]
        if position < positions and rank < k and log_probs[position, rank] > -math.inf:
            score = tree.scores[parent] + float(log_probs[position, rank])
            heapq.heappush(heap, (-score, (*tree.ranks[parent], rank), parent))

    def take(score: float, ranks: tuple[int, ...], parent: int) -> None:
        tree.tokens.append(int(token_ids[tree.depths[parent], ranks[-1]]))
        tree.parents.append(parent)
        tree.depths.append(tree.depths[parent] + 1)
        tree.ranks.append(ranks)
        tree.scores.append(score)

    offer(0, 0)
    if spine:
        siblings = []
        while heap and len(tree) < width:
            score, ranks, parent = heapq.heappop(heap)
            take(-score, ranks, parent)
            siblings.append(parent)
            offer(len(tree) - 1, 0)
        for parent in siblings:
            offer(parent, 1)
    while heap and len(tree) < width:
        score, ranks, parent = heapq.heappop(heap)
        if -score < min_log_prob:
            break
        take(-score, ranks, parent)
        offer(parent, ranks[-1] + 1)
        offer(len(tree) - 1, 0)
    return tree


def accept(tree: Tree, drawn: Any) -> tuple[list[int], int]:
    """Walk from the root along the target's own choices (section 3.3 of the paper).

    drawn: [nodes], the token that the target chose after each node: its best one, or one draw from its distribution.
    Returns the accepted nodes, root first, and the token after the last of them, the next tree's root.
    """
    path = [0]
    while True:
        matching = [child for child in tree.children(path[-1]) if tree.tokens[child] == int(drawn[path[-1]])]
        if not matching:
            return path, int(drawn[path[-1]])
        path.append(matching[0])


def moves(path: list[int]) -> list[tuple[int, int]]:
    """How the accepted nodes' KV rows come to stand behind the prefix, in order: (from, to) by node, without rows that
    stay. All are read before any is written."""
    return [(node, place) for place, node in enumerate(path) if node != place]


def top_k(logits: Any, k: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], float]:
    """The k likeliest tokens of a row of logits [vocabulary], likeliest first, of equals the smaller id first; their
    log-probabilities; and the logarithm of the sum of exponentials of the row. NaN counts as -inf."""
    row = np.asarray(logits, np.float64)
    row = np.where(np.isnan(row), -np.inf, row)
    ids = np.lexsort((np.arange(len(row)), -row))[:k]
    largest = row.max()
    if largest == -np.inf:
        return ids, row[ids], -math.inf
    normaliser = float(largest + np.log(np.exp(row - largest).sum()))
    return ids, row[ids] - normaliser, normaliser
