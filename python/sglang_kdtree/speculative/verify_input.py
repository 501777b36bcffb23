# SPDX-License-Identifier: Apache-2.0
"""What a target verify forward of trees carries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.speculative.dflash_info import DFlashVerifyInput


@dataclass
class DDTreeVerifyInput(DFlashVerifyInput):
    """draft_token: [batch * width] int64, each request's nodes in the order of its tree, root first. positions:
    [batch * width] int64, prefix length plus depth. packed_mask: [batch * width, ceil(width / 32)] int32, as the op
    kdtree_mla_verify takes it."""

    packed_mask: torch.Tensor | None = None

    @property
    def tree_topk(self) -> int:
        return -1  # an irregular tree, as NGRAM's are
