# SPDX-License-Identifier: Apache-2.0
"""Random inputs of one shape of the op, on any device."""

from __future__ import annotations

import numpy as np
import torch

from kdtree_spec.oracle import ancestor_mask, pack_tree_mask

SCALE = 192**-0.5


def random_trees(batch: int, width: int, seed: int = 0) -> np.ndarray:
    """Ancestor masks of a random tree a request: bool [batch * width, width]."""
    rng = np.random.default_rng(seed)
    parents = [[-1] + [int(rng.integers(0, i)) for i in range(1, width)] for _ in range(batch)]
    return np.concatenate([ancestor_mask(p) for p in parents])


class Problem:
    """`batch` requests with `prefix` committed tokens and a random tree of `width` nodes each.

    Slots lie at random places of `kv_cache` ([slots, 1, 576], at least batch * (prefix + width) slots), which is made
    if it is not given.
    """

    def __init__(
        self,
        heads: int,
        width: int,
        prefix: int,
        batch: int,
        dtype: torch.dtype,
        device: str = "cpu",
        kv_cache: torch.Tensor | None = None,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.batch, self.width, self.prefix, self.heads = batch, width, prefix, heads
        length = prefix + width
        if kv_cache is None:
            kv_cache = torch.randn(batch * length + 64, 1, 576, generator=generator, device=device).to(dtype)
        self.kv_cache = kv_cache
        self.q = torch.randn(batch * width, heads, 576, generator=generator, device=device).to(dtype)
        permuted = torch.randperm(len(kv_cache), generator=generator, device=device)[: batch * length]
        self.slot_table = permuted.view(batch, length).int()
        self.table_rows = torch.arange(batch, device=device)
        self.prefix_lens = torch.full((batch,), prefix, device=device)
        self.mask = random_trees(batch, width, seed)
        self.tree_mask = torch.from_numpy(pack_tree_mask(self.mask)).to(device)
        self.out = torch.empty(batch * width, heads, 512, dtype=dtype, device=device)
        self.workspace = None
        if device == "cuda":
            size = torch.ops.sgl_kernel.kdtree_mla_workspace_bytes(heads, width, torch.cuda.current_device())
            self.workspace = torch.empty(size, dtype=torch.uint8, device=device)

    def run_op(self) -> torch.Tensor:
        # fmt: off
        torch.ops.sgl_kernel.kdtree_mla_verify(
            self.q, self.kv_cache, self.slot_table, self.table_rows, 1, self.prefix_lens, self.tree_mask, SCALE, 1.0,
            self.out, None, self.workspace)
        # fmt: on
        return self.out
