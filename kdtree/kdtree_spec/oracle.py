# SPDX-License-Identifier: Apache-2.0
"""The numpy oracle: slow, obvious, float64. It shares no code with what it checks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.integer]

LATENT = 512
HEAD = 576


def pack_tree_mask(mask: BoolArray) -> npt.NDArray[np.int32]:
    """Bit words of a tree mask: bit j % 32 of word j // 32 of row i is mask[i, j].

    mask: [rows, width]. Returns [rows, ceil(width / 32)].
    """
    rows, width = mask.shape
    words = np.zeros((rows, (width + 31) // 32), np.uint32)
    for j in range(width):
        words[:, j // 32] |= mask[:, j].astype(np.uint32) << np.uint32(j % 32)
    return words.view(np.int32)


def ancestor_mask(parents: list[int]) -> BoolArray:
    """Tree mask [nodes, nodes] of one tree: a node sees itself and its ancestors. parents[0] is -1 (the root)."""
    mask = np.zeros((len(parents), len(parents)), np.bool_)
    for node in range(len(parents)):
        ancestor = node
        while ancestor >= 0:
            mask[node, ancestor] = True
            ancestor = parents[ancestor]
    return mask


def mla_verify(
    q: FloatArray,
    kv_cache: FloatArray,
    slot_table: IntArray,
    table_rows: IntArray,
    page: int,
    prefix_lens: IntArray,
    tree_mask: BoolArray | None,
    sm_scale: float,
    k_scale: float = 1.0,
) -> tuple[FloatArray, FloatArray]:
    """Absorbed MLA attention of draft trees (DeepSeek-V2, arXiv 2405.04434, section 2.1; weights absorbed).

    q: [batch * width, heads, 576]; kv_cache: [slots, 1, 576], of which a key is the whole row and its value the first
    512 columns; slot_table: [rows, columns]; table_rows, prefix_lens: [batch] (a prefix below 0: no such request);
    tree_mask: [batch * width, width] or None for a causal chain.
    Returns out [batch * width, heads, 512] and lse [batch * width, heads] (natural log; -inf where nothing is seen).
    """
    batch = len(table_rows)
    width = len(q) // batch
    out = np.zeros((len(q), q.shape[1], LATENT))
    lse = np.full((len(q), q.shape[1]), -np.inf)
    for b in range(batch):
        prefix = int(prefix_lens[b])
        if prefix < 0:
            continue
        row = slot_table[table_rows[b]]
        slots = [int(row[p // page]) * page + p % page for p in range(prefix + width)]
        keys = kv_cache[slots, 0].astype(np.float64) * k_scale
        for i in range(width):
            token = b * width + i
            in_tree = np.arange(width) <= i if tree_mask is None else tree_mask[token]
            seen = np.concatenate([np.ones(prefix, np.bool_), in_tree])
            if not seen.any():
                continue
            scores = q[token].astype(np.float64) @ keys[seen].T * sm_scale
            peak = scores.max(axis=1, keepdims=True)
            weights = np.exp(scores - peak)
            total = weights.sum(axis=1, keepdims=True)
            out[token] = weights / total @ keys[seen, :LATENT]
            lse[token] = (peak + np.log(total))[:, 0]
    return out, lse
