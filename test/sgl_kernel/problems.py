# SPDX-License-Identifier: Apache-2.0
"""Random calls of kdtree_mla_verify, and the comparison of their results with the numpy oracle in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kdtree_spec import oracle

SCALE = 192**-0.5


@dataclass
class Inputs:
    """Arguments of one call; `mask` is the boolean tree mask that the packed one was made from."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    slot_table: torch.Tensor
    table_rows: torch.Tensor
    prefix_lens: torch.Tensor
    mask: np.ndarray | None
    page: int = 1
    sm_scale: float = SCALE
    k_scale: float = 1.0


def random_tree(rng: np.random.Generator, width: int) -> np.ndarray:
    return oracle.ancestor_mask([-1] + [int(rng.integers(0, i)) for i in range(1, width)])


def make(
    heads: int = 4,
    width: int = 4,
    prefixes: tuple[int, ...] = (70, 3),
    dtype: torch.dtype = torch.float32,
    page: int = 1,
    chain: bool = False,
    seed: int = 0,
) -> Inputs:
    """Random values; slots scattered over the cache, table rows in another order than the batch."""
    rng = np.random.default_rng(seed)
    g = torch.Generator().manual_seed(seed)
    batch = len(prefixes)
    columns = (max(prefixes) + width + page - 1) // page + 2
    rows = batch + 2
    pages = rng.permutation(rows * columns + 3)[: rows * columns]
    slots = (rows * columns + 3) * page
    mask = None if chain else np.concatenate([random_tree(rng, width) for _ in range(batch)])
    return Inputs(
        q=torch.randn(batch * width, heads, 576, generator=g).to(dtype),
        kv_cache=torch.randn(slots, 1, 576, generator=g).to(dtype),
        slot_table=torch.from_numpy(pages.reshape(rows, columns).astype(np.int32)),
        table_rows=torch.from_numpy(rng.permutation(rows)[:batch].copy()),
        prefix_lens=torch.tensor(prefixes),
        mask=mask,
        page=page,
    )


def compare(x: Inputs, out: torch.Tensor, lse: torch.Tensor, tolerance: float) -> None:
    """Assert that the oracle's out is met within a relative error (Frobenius norm), its lse nearly exactly, and that
    neither has a NaN."""
    want, want_lse = oracle.mla_verify(
        x.q.double().cpu().numpy(),
        x.kv_cache.double().cpu().numpy(),
        x.slot_table.cpu().numpy(),
        x.table_rows.cpu().numpy(),
        x.page,
        x.prefix_lens.cpu().numpy(),
        x.mask,
        x.sm_scale,
        x.k_scale,
    )
    got, got_lse = out.double().cpu().numpy(), lse.double().cpu().numpy()
    assert not np.isnan(got).any() and not np.isnan(got_lse).any()
    error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
    assert error <= tolerance, f"relative error {error:.2e}"
    np.testing.assert_array_equal(np.isneginf(got_lse), np.isneginf(want_lse))
    seen = ~np.isneginf(want_lse)
    np.testing.assert_allclose(got_lse[seen], want_lse[seen], rtol=1e-5, atol=1e-4)


def packed_mask(x: Inputs) -> torch.Tensor | None:
    return None if x.mask is None else torch.from_numpy(oracle.pack_tree_mask(x.mask)).to(x.q.device)
