# SPDX-License-Identifier: Apache-2.0
"""What a batch carries from one round to the next: the roots, and where the cache's slots are reserved to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.allocation import alloc_paged_token_slots_extend, assign_req_to_token_pool_func
from sglang.srt.mem_cache.allocation_sizing import page_aligned_decode_alloc_lens
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


class DDTreeState(DFlashDraftInputV2):
    """bonus_tokens: [batch] int64, the next roots; new_seq_lens: [batch] int64, committed tokens."""

    @classmethod
    def after(cls, roots: torch.Tensor, seq_lens: torch.Tensor) -> DDTreeState:
        unused = torch.empty((len(roots), 0), device=roots.device)
        return cls(
            topk_p=unused,
            topk_index=unused,
            bonus_tokens=roots.long(),
            new_seq_lens=seq_lens.long(),
            hidden_states=unused,
        )

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        """Reserve slots for the next rounds' trees; the scheduler calls it before each."""
        if batch.seq_lens.device.type == "cpu" and batch.token_to_kv_pool_allocator.page_size > 1:
            self._reserve_pages(batch)
        else:
            super().prepare_for_decode(batch)

    def _reserve_pages(self, batch: ScheduleBatch) -> None:
        """On the CPU, where upstream's way to find a request's last slot is a Triton kernel."""
        reqs, rows = batch.reqs, batch.req_pool_indices
        if not reqs:
            return
        allocated, wanted, missing = page_aligned_decode_alloc_lens(
            reqs,
            reserve=2 * get_spec().speculative_num_draft_tokens,  # this round's and the next one's
            page_size=batch.token_to_kv_pool_allocator.page_size,
        )
        have, want = torch.tensor(allocated, dtype=torch.int32), torch.tensor(wanted, dtype=torch.int32)
        if missing > 0:
            table = batch.req_to_token_pool.req_to_token
            last = torch.where(have > 0, table[rows, (have - 1).clamp(min=0).long()], -1)
            slots = alloc_paged_token_slots_extend(
                batch.tree_cache, have, have, want, want, last, missing, req_pool_indices=rows, batch=batch
            )
            assign_req_to_token_pool_func(rows, table, have, want, slots, len(reqs))
        for req, length in zip(reqs, wanted, strict=True):
            req.kv.kv_allocated_len = max(req.kv.kv_allocated_len, length)
            req.decode_batch_idx += 1
        batch.seq_lens_cpu = torch.tensor([req.kv.kv_committed_len for req in reqs])
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        self.nxt_kv_lens_cpu, self.nxt_kv_lens_sum = want, sum(wanted)
