# SPDX-License-Identifier: Apache-2.0
"""The other implementations on a GPU, each as a function of a problem that returns what to time.

`triton` takes the tree mask and the random slots of the problem, as the op does. FlashInfer and FlashMLA take neither:
they get a causal chain, and the problem's requests in pages of 64 tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from verify_attention.problem import SCALE, Problem

Run = Callable[[], torch.Tensor]
PAGE = 64


class Paged:
    """The problem as a causal chain whose requests lie in random pages of 64 tokens."""

    def __init__(self, p: Problem) -> None:
        self.p = p
        self.length = p.prefix + p.width
        self.pages = -(-self.length // PAGE)
        permuted = torch.randperm(len(p.kv_cache) // PAGE, device="cuda")[: p.batch * self.pages]
        self.block_table = permuted.view(p.batch, self.pages).int().contiguous()
        self.cache = p.kv_cache[: len(p.kv_cache) // PAGE * PAGE].view(-1, PAGE, 576)
        self.lens = torch.full((p.batch,), self.length, dtype=torch.int32, device="cuda")
        self.out = torch.empty_like(p.out)

    def run_op(self) -> torch.Tensor:
        p = self.p
        # fmt: off
        torch.ops.sgl_kernel.kdtree_mla_verify(p.q, p.kv_cache, self.block_table, p.table_rows, PAGE, p.prefix_lens,
                                               None, SCALE, 1.0, self.out, None, p.workspace)
        # fmt: on
        return self.out


def triton_tree(p: Problem) -> Run:
    """Upstream's extend_attention_fwd, as TritonAttnBackend calls it for target verify."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    tokens = p.batch * p.width
    k_extend = p.kv_cache[p.slot_table[:, p.prefix :].flatten().long()].contiguous()
    out = torch.empty_like(p.out)
    qo_indptr = torch.arange(0, tokens + 1, p.width, dtype=torch.int32, device="cuda")
    kv_indptr = torch.arange(p.batch + 1, dtype=torch.int32, device="cuda") * p.prefix
    kv_indices = p.slot_table[:, : p.prefix].flatten().long()
    seen = np.ones((p.batch, p.width, p.prefix + p.width), dtype=bool)
    seen[..., p.prefix :] = p.mask.reshape(p.batch, p.width, p.width)
    custom_mask = torch.from_numpy(seen).flatten().cuda()
    mask_indptr = torch.arange(p.batch + 1, device="cuda") * (p.width * (p.prefix + p.width))

    def run() -> torch.Tensor:
        # fmt: off
        extend_attention_fwd(p.q, k_extend, k_extend[..., :512], out, p.kv_cache, p.kv_cache[..., :512], qo_indptr,
                             kv_indptr, kv_indices, custom_mask, True, mask_indptr, p.width, 1.0, 1.0,
                             sm_scale=SCALE)
        # fmt: on
        return out

    return run


def triton_decode(splits: int) -> Callable[[Problem], Run]:
    """Upstream's decode_attention_fwd with a number of KV splits."""

    def prepare(p: Problem) -> Run:
        from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

        length = p.prefix + 1
        out = torch.empty_like(p.out)
        kv_indptr = torch.arange(p.batch + 1, dtype=torch.int32, device="cuda") * length
        kv_indices = p.slot_table.flatten().long()
        logits = torch.empty(p.batch, p.heads, splits, 512, device="cuda")
        lse = torch.empty(p.batch, p.heads, splits, device="cuda")
        num_splits = torch.full((p.batch,), splits, dtype=torch.int32, device="cuda")

        def run() -> torch.Tensor:
            # fmt: off
            decode_attention_fwd(p.q, p.kv_cache, p.kv_cache[..., :512], out, kv_indptr, kv_indices, logits, lse,
                                 num_splits, splits, SCALE, 1.0, 1.0, has_mla=True)
            # fmt: on
            return out

        return run

    return prepare


_flashinfer_workspace: list[torch.Tensor] = []


def flashinfer(backend: str) -> Callable[[Paged], Run]:
    """FlashInfer's BatchMLAPagedAttentionWrapper; `backend` is fa2 or fa3 (Hopper only)."""

    def prepare(paged: Paged) -> Run:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        p = paged.p
        if not _flashinfer_workspace:
            _flashinfer_workspace.append(torch.empty(128 << 20, dtype=torch.uint8, device="cuda"))
        wrapper = BatchMLAPagedAttentionWrapper(_flashinfer_workspace[0], backend=backend)
        wrapper.plan(
            qo_indptr=torch.arange(p.batch + 1, dtype=torch.int32) * p.width,
            kv_indptr=torch.arange(p.batch + 1, dtype=torch.int32) * paged.pages,
            kv_indices=paged.block_table.flatten(),
            kv_len_arr=paged.lens.cpu(),
            num_heads=p.heads,
            head_dim_ckv=512,
            head_dim_kpe=64,
            page_size=PAGE,
            causal=True,
            sm_scale=SCALE,
            q_data_type=p.q.dtype,
            kv_data_type=p.q.dtype,
        )
        query = p.q[..., :512].contiguous(), p.q[..., 512:].contiguous()
        keys = paged.cache[..., :512], paged.cache[..., 512:]
        out = torch.empty_like(p.out)

        def run() -> torch.Tensor:
            wrapper.run(query=query, kv_cache=keys, out=out)
            return out

        return run

    return prepare


def flashmla(paged: Paged) -> Run:
    """sgl_kernel's FlashMLA (Hopper only)."""
    from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

    p = paged.p
    metadata, num_splits = get_mla_metadata(paged.lens, p.width * p.heads, 1)
    q = p.q.view(p.batch, p.width, p.heads, 576)
    cache = paged.cache[:, :, None]

    def run() -> torch.Tensor:
        # fmt: off
        out, _ = flash_mla_with_kvcache(q, cache, paged.block_table, paged.lens, 512, metadata, num_splits,
                                        softmax_scale=SCALE, causal=True)
        # fmt: on
        return out.view(-1, p.heads, 512)

    return run
