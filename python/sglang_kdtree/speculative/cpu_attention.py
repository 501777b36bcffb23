# SPDX-License-Identifier: Apache-2.0
"""The drafter's attention on the CPU, in plain torch: upstream has no backend there that verifies or drafts blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

NAME = "kdtree_draft_cpu"


class CpuDraftAttention(AttentionBackend):
    """Blocks of a DFlash drafter: every position sees the committed tokens and its whole block."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        self._pool = runner.token_to_kv_pool
        self._table = runner.req_to_token_pool.req_to_token

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Nothing is shared between layers but the batch itself."""

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """q: [batch * block, heads * dim]; k, v: [batch * block, kv_heads * dim]. Returns the shape of q."""
        if layer.attn_type != AttentionType.ENCODER_ONLY or kwargs.get("sinks") is not None:
            raise NotImplementedError(
                "on the CPU, DDTREE serves drafters whose layers all have full attention inside the block and no sinks"
            )
        heads, kv_heads, dim = layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim
        k, v = k.view(-1, kv_heads, dim), v.view(-1, kv_heads, layer.v_head_dim)
        self._pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, physical=True), k, v)
        keys, values = self._pool.get_key_buffer(layer.layer_id), self._pool.get_value_buffer(layer.layer_id)
        queries = q.view(forward_batch.batch_size, -1, heads, dim).transpose(1, 2)
        block = queries.shape[2]
        outputs = []
        for i, length in enumerate(forward_batch.seq_lens.tolist()):
            slots = self._table[forward_batch.req_pool_indices[i], : length + block].long()
            seen_k, seen_v = keys[slots].transpose(0, 1)[None], values[slots].transpose(0, 1)[None]
            outputs.append(
                torch.nn.functional.scaled_dot_product_attention(
                    queries[i][None], seen_k, seen_v, scale=layer.scaling, enable_gqa=True
                )
            )
        return torch.cat(outputs).transpose(1, 2).reshape(-1, heads * layer.v_head_dim)


def create_backend(runner: ModelRunner) -> CpuDraftAttention:
    return CpuDraftAttention(runner)
