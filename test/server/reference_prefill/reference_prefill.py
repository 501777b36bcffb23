# SPDX-License-Identifier: Apache-2.0
"""A plug-in of the tests: a slow prefill-only MLA backend in plain torch, registered as `torch_native_mla`.

Of upstream's own backends none can prefill an MLA model on a CPU without AMX, and `--decode-attention-backend
kdtree_mla` is about another backend doing the prefill.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.arg_groups.choices import add_attention_backend_choices
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

NAME = "torch_native_mla"


class ReferencePrefill(AttentionBackend):
    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.pool = runner.token_to_kv_pool
        self.table = runner.req_to_token_pool.req_to_token
        self.used = False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        assert not forward_batch.forward_mode.is_decode(), "decode went to the prefill backend"
        assert not forward_batch.forward_mode.is_target_verify(), "verify went to the prefill backend"
        if not self.used:
            self.used = True
            print("reference_prefill: prefilling", flush=True)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        batch: Any,
        save_kv_cache: bool = True,
        **_: Any,
    ) -> torch.Tensor:
        heads = layer.tp_q_head_num
        q = q.view(-1, heads, layer.qk_head_dim)
        k = k.view(len(q), -1, layer.qk_head_dim)
        v = v.view(len(q), -1, layer.v_head_dim)
        if save_kv_cache:
            self.pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
        outputs = []
        first = 0
        for row, new, prefix in zip(
            batch.req_pool_indices, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True
        ):
            keys, values = k[first : first + new], v[first : first + new]
            if prefix:
                cached = self.pool.get_key_buffer(layer.layer_id)[self.table[row, :prefix].long()]
                keys = torch.cat((cached, keys))
                values = keys[..., : layer.v_head_dim]
            scores = torch.einsum("ihd,jhd->hij", q[first : first + new], keys.expand(-1, heads, -1)) * layer.scaling
            seen = torch.ones(new, prefix + new, dtype=torch.bool).tril(prefix)
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            outputs.append(torch.einsum("hij,jhd->ihd", weights, values.expand(-1, heads, -1)))
            first += new
        return torch.cat(outputs).reshape(-1, heads * layer.v_head_dim)


def register() -> None:
    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(ReferencePrefill)
