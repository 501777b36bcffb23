# SPDX-License-Identifier: Apache-2.0
"""Upstream's boolean tree masks, packed into the bit words that the op takes."""

from __future__ import annotations

import torch


def qlen_only(mask: torch.Tensor, prefix_lens: torch.Tensor, width: int) -> torch.Tensor:
    """The tree part of either of upstream's two layouts, as [batch * width, width] bool.

    mask: flat bool. QLEN_ONLY: width * width a request. FULL_MASK: width * (prefix_len + width) a request, request
    after request, whose first prefix_len columns are all true. The layouts differ in size unless every prefix is empty,
    and then they are the same. prefix_lens: [batch]. No host sync.
    Raises ValueError for a QLEN_ONLY mask too short for the batch.
    """
    batch = prefix_lens.shape[0]
    if mask.numel() < batch * width * width:
        raise ValueError(
            f"tree mask of {mask.numel()} values is too short for {batch} requests of {width} draft tokens: expected "
            f"{batch * width * width} (QLEN_ONLY) or more (FULL_MASK)"
        )
    if mask.numel() == batch * width * width:
        return mask.view(batch * width, width)
    row_lens = prefix_lens.long() + width
    request_start = torch.cumsum(row_lens * width, 0) - row_lens * width
    nodes = torch.arange(width, device=mask.device)
    row_start = request_start[:, None] + nodes * row_lens[:, None] + prefix_lens[:, None]
    return mask[(row_start[:, :, None] + nodes).view(batch * width, width)]


def pack(mask: torch.Tensor) -> torch.Tensor:
    """Bit words of a mask: bit j % 32 of word j // 32 of row i is mask[i, j].

    mask: [rows, width] bool. Returns [rows, ceil(width / 32)] int32, contiguous.
    """
    rows, width = mask.shape
    words = (width + 31) // 32
    padded = torch.nn.functional.pad(mask, (0, words * 32 - width)).view(rows, words, 32)
    bits = torch.ones(32, dtype=torch.int64, device=mask.device) << torch.arange(32, device=mask.device)
    packed = (padded * bits).sum(-1)
    # Bit 31 is int32's sign.
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
