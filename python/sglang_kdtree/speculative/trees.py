# SPDX-License-Identifier: Apache-2.0
"""A batch's draft trees on the device: what the ops kdtree_build_tree and kdtree_accept write and read."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Trees:
    """tokens, next_token, next_sibling: [batch, width] int64; depths, parents: [batch, width] int32; mask:
    [batch * width, ceil(width / 32)] int32; counts: [batch] int32. See sgl-kernel/csrc/speculative/tree_schema.h."""

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    mask: torch.Tensor
    next_token: torch.Tensor
    next_sibling: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def empty(cls, batch: int, width: int, device: torch.device | str) -> Trees:
        def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            tokens=make(torch.int64, batch, width),
            parents=make(torch.int32, batch, width),
            depths=make(torch.int32, batch, width),
            mask=make(torch.int32, batch * width, (width + 31) // 32),
            next_token=make(torch.int64, batch, width),
            next_sibling=make(torch.int64, batch, width),
            counts=make(torch.int32, batch),
        )

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def first(self, batch: int) -> Trees:
        """The trees of the first `batch` requests; shares memory."""
        return Trees(
            tokens=self.tokens[:batch],
            parents=self.parents[:batch],
            depths=self.depths[:batch],
            mask=self.mask[: batch * self.width],
            next_token=self.next_token[:batch],
            next_sibling=self.next_sibling[:batch],
            counts=self.counts[:batch],
        )

    def build(
        self, log_probs: torch.Tensor, token_ids: torch.Tensor, roots: torch.Tensor, spine: bool, min_log_prob: float
    ) -> None:
        """Write the best-first trees of log_probs [batch, positions, top_k] fp32, token_ids [batch, positions, top_k]
        int64 and roots [batch] int64."""
        torch.ops.sgl_kernel.kdtree_build_tree(
            log_probs,
            token_ids,
            roots,
            spine,
            min_log_prob,
            self.tokens,
            self.parents,
            self.depths,
            self.mask,
            self.next_token,
            self.next_sibling,
            self.counts,
        )

    def accept(self, drawn: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Walk along drawn [batch, width] int64, the target's token after each node.

        Returns paths [batch, limit] int32, the accepted nodes, root first, then -1; counts [batch] int32, their
        number; bonus [batch] int64, the token after the last of them.
        """
        batch = len(self.tokens)
        paths = torch.empty(batch, limit, dtype=torch.int32, device=drawn.device)
        counts = torch.empty(batch, dtype=torch.int32, device=drawn.device)
        bonus = torch.empty(batch, dtype=torch.int64, device=drawn.device)
        torch.ops.sgl_kernel.kdtree_accept(self.tokens, self.next_token, self.next_sibling, drawn, paths, counts, bonus)
        return paths, counts, bonus
