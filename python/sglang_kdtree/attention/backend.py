# SPDX-License-Identifier: Apache-2.0
"""The attention backend `kdtree_mla`: MLA attention of decode, tree verify and draft-extend through one op.

Decode is a tree of one node. Target verify is a tree of `width` nodes a request. What changes once a step is computed
once, in the init_forward_metadata methods; a layer then writes its KV rows and calls the op.

Prefill goes through upstream's Triton backend on CUDA. On the CPU, where upstream has none for MLA, a chunk behind a
cached prefix is cut into causal chains of at most 256 tokens for the op, and a first chunk is plain attention.

In a CUDA graph the op reads the graph's own lengths and table rows, and tree masks from one packed buffer that is
filled before each replay. A graph is captured with a mask or without one, so a chain never reads a tree's.
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from sglang_kdtree.attention import tree_mask
from sglang_kdtree.attention.support import LATENT, ROPE, check_supported, kernel_variant
from sglang_kdtree.metrics import RankMetrics

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

MAX_WIDTH = 256  # draft tokens a request that one call of the op takes


@dataclass(frozen=True)
class Call:
    """One call of the op: `width` query tokens of each of some requests.

    tokens: rows of the step's flat token dimension, or None where the call covers all of them in order.
    table_rows: [batch] int64; prefix_lens: [batch]; mask: [batch * width, words] int32, or None for causal chains.
    """

    width: int
    tokens: torch.Tensor | None
    table_rows: torch.Tensor
    prefix_lens: torch.Tensor
    mask: torch.Tensor | None = None


@dataclass(frozen=True)
class StepMetadata:
    """What one forward step's layers share.

    calls: how the step's tokens are attended in absorbed form. extend_lens: new tokens a request, in an extend step.
    """

    calls: list[Call]
    extend_lens: list[int] | None = None


def has_tree(spec: Any) -> bool:
    """Whether a verify input has a mask that says more than a chain (topk 1) does; irregular trees say -1."""
    if getattr(spec, "packed_mask", None) is not None:
        return True
    mask = getattr(spec, "custom_mask", None)
    topk = getattr(spec, "tree_topk", getattr(spec, "topk", None))
    return mask is not None and mask.numel() > 0 and topk != 1


class KDTreeMLABackend(AttentionBackend):
    """See the module. Refuses what it does not serve with UnsupportedError."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        check_supported(runner)
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.slot_table: torch.Tensor = runner.req_to_token_pool.req_to_token
        self.kv_index_translator = runner.kv_index_translator
        self.data_type = self.kv_cache_dtype = runner.kv_cache_dtype
        self.forward_metadata: StepMetadata | None = None
        self._verify_mask = self._make_verify_mask(runner)
        self._graph_mask: torch.Tensor | None = None  # [max_bs * width, words] int32
        self._runner = runner
        # What upstream captures a DFlash family's graphs with is a chain, whatever is verified in them later.
        self._verifies_trees = not runner.is_draft_worker and getattr(runner.spec_algorithm, "verifies_trees", False)
        self._on_cuda = torch.device(runner.device).type == "cuda"
        self._workspaces: dict[int, torch.Tensor | None] = {}
        self._heads = runner.model_config.num_attention_heads // get_parallel().attn_tp_size
        if self._on_cuda:
            for width in {1, get_spec().speculative_num_draft_tokens or 1}:
                self._workspace(width)
        self._tell_start(runner)

    @functools.cached_property
    def _prefill(self) -> AttentionBackend:
        """What prefill goes through on CUDA; made when it is first needed, as beside another backend it never is."""
        from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

        return TritonAttnBackend(self._runner)

    def _workspace(self, width: int) -> torch.Tensor | None:
        """The op's workspace for a width: made once, before any graph is captured, and never moved."""
        if not self._on_cuda:
            return None
        if width not in self._workspaces:
            device = torch.device(self._runner.device)
            index = torch.cuda.current_device() if device.index is None else device.index
            size = torch.ops.sgl_kernel.kdtree_mla_workspace_bytes(self._heads, width, index)
            fits = [w for w in self._workspaces.values() if w is not None and w.numel() >= size]
            self._workspaces[width] = fits[0] if fits else torch.empty(size, dtype=torch.uint8, device=device)
        return self._workspaces[width]

    @staticmethod
    def _make_verify_mask(runner: ModelRunner) -> VerifyMask | None:
        """The QLEN_ONLY mask that a draft stage fills in place: width * width a request, whatever the context."""
        width = get_spec().speculative_num_draft_tokens
        if runner.is_draft_worker or not width:
            return None
        max_batch = runner.req_to_token_pool.size
        buffer = torch.zeros(max_batch * width * width, dtype=torch.bool, device=runner.device)
        return VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=max_batch)

    def _tell_start(self, runner: ModelRunner) -> None:
        """One line in the log, and the same facts in the metrics."""
        parallel = get_parallel()
        kernel, kv_cache = kernel_variant(runner), str(runner.kv_cache_dtype).removeprefix("torch.")
        logger.info(
            "kdtree_mla: rank=%d/%d pid=%d device=%s kernel=%s kv_cache=%s mode=native role=%s",
            parallel.tp_rank,
            parallel.tp_size,
            os.getpid(),
            runner.device,
            kernel,
            kv_cache,
            "draft" if runner.is_draft_worker else "target",
        )
        self._metrics = RankMetrics(runner, parallel.tp_rank)
        self._metrics.info(parallel.tp_size, str(runner.device), kernel, kv_cache, "native")

    def _count(self, forward_batch: ForwardBatch) -> None:
        """A step in the metrics. The requests that pad a graph's batch count as rows of a decode."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        rows = len(forward_batch.req_pool_indices)
        if mode.is_target_verify():
            tokens = forward_batch.spec_info.draft_token
            rows = rows * forward_batch.spec_info.draft_token_num if tokens is None else len(tokens)
        elif mode.is_extend() and forward_batch.extend_seq_lens_cpu is not None:
            rows = sum(forward_batch.extend_seq_lens_cpu)
        self._metrics.step(mode.name.lower(), rows)

    @property
    def verify_mask(self) -> VerifyMask | None:
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Nothing to do: the mask is packed in init_forward_metadata, which runs after the draft stage."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Eager: everything of the step."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = StepMetadata(calls=[])
        elif mode.is_decode():
            self.forward_metadata = StepMetadata(calls=[self._decode_call(forward_batch)])
        elif mode.is_target_verify():
            self.forward_metadata = StepMetadata(
                calls=[self._verify_call(forward_batch, self._packed_mask(forward_batch))]
            )
        elif self._through_op(mode):
            self.forward_metadata = self._extend_metadata(forward_batch)
        else:
            self._prefill.init_forward_metadata(forward_batch)
            self.forward_metadata = StepMetadata(calls=[])
        self._count(forward_batch)

    def _through_op(self, mode: ForwardMode) -> bool:
        """Whether an extend of this mode goes through the op; otherwise upstream's prefill serves it."""
        return not self._on_cuda or mode.is_draft_extend_v2()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        width = max_num_tokens // max_bs
        words = (width + 31) // 32
        # Ones: a padded request's rows see all of its tokens, as good as any other padding.
        self._graph_mask = torch.full((max_bs * width, words), -1, dtype=torch.int32, device=self._runner.device)
        self._workspace(width)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1  # a padded request decodes one token

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Before a capture or a replay: the step's tree masks, packed into the graph's buffer."""
        if not in_capture:
            self._count(forward_batch)
        if forward_batch.forward_mode.is_target_verify():
            packed = self._packed_mask(forward_batch)
            if packed is not None:
                self._graph_mask[: len(packed)].copy_(packed)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Recorded: lengths are computed on the device, from the graph's own buffers."""
        mode = forward_batch.forward_mode
        if mode.is_decode_or_idle():
            call = self._decode_call(forward_batch)
        elif mode.is_target_verify():
            spec = forward_batch.spec_info
            rows = len(forward_batch.req_pool_indices) * spec.draft_token_num
            tree = self._verifies_trees or has_tree(spec)
            call = self._verify_call(forward_batch, self._graph_mask[:rows] if tree else None)
        elif mode.is_draft_extend_v2():
            call = self._draft_extend_call(forward_batch)
        else:
            raise NotImplementedError(f"kdtree_mla: no CUDA graph of the forward mode {mode.name}")
        self.forward_metadata = StepMetadata(calls=[call])

    @staticmethod
    def _decode_call(forward_batch: ForwardBatch) -> Call:
        # seq_lens counts the token that this step computes.
        return Call(1, None, forward_batch.req_pool_indices, forward_batch.seq_lens - 1)

    @staticmethod
    def _verify_call(forward_batch: ForwardBatch, mask: torch.Tensor | None) -> Call:
        # seq_lens counts the committed tokens and not the tree's.
        width: int = forward_batch.spec_info.draft_token_num
        return Call(width, None, forward_batch.req_pool_indices, forward_batch.seq_lens, mask)

    def _packed_mask(self, forward_batch: ForwardBatch) -> torch.Tensor | None:
        """[requests * width, words] int32 of the requests that have a tree, without a graph's padded ones; None for
        chains."""
        spec = forward_batch.spec_info
        if not has_tree(spec):
            return None
        packed = getattr(spec, "packed_mask", None)
        if packed is not None:
            return packed
        width: int = spec.draft_token_num
        mask, prefix_lens = spec.custom_mask, forward_batch.seq_lens
        if spec.draft_token is not None:
            prefix_lens = prefix_lens[: len(spec.draft_token) // width]
        offered = self._verify_mask
        in_place = offered is not None and mask.data_ptr() == offered.buffer.data_ptr()
        if in_place or spec.draft_token is None:  # the buffers of the largest batch, or of a capture
            mask = mask[: len(prefix_lens) * width * width]
        return tree_mask.pack(tree_mask.qlen_only(mask, prefix_lens, width))

    @staticmethod
    def _draft_extend_call(forward_batch: ForwardBatch) -> Call:
        """In a graph every request extends by as many tokens; those past its real ones are thrown away later."""
        spec = forward_batch.spec_info
        width = len(forward_batch.input_ids) // len(forward_batch.req_pool_indices)
        prefix_lens = forward_batch.seq_lens
        extended = getattr(spec, "extend_seq_lens_tensor", None)
        if extended is not None:
            prefix_lens = (prefix_lens - extended[: len(prefix_lens)]).clamp(min=0)
        return Call(width, None, forward_batch.req_pool_indices, prefix_lens)

    @staticmethod
    def _extend_metadata(forward_batch: ForwardBatch) -> StepMetadata:
        """Cut each request's new tokens into chains of at most MAX_WIDTH; chains of one width share a call."""
        extend_lens = list(forward_batch.extend_seq_lens_cpu)
        prefix_lens = list(forward_batch.extend_prefix_lens_cpu)
        chains: dict[int, list[tuple[int, int, int]]] = {}  # width -> (first token, request, tokens before it)
        first = 0
        for request, (extend, prefix) in enumerate(zip(extend_lens, prefix_lens, strict=True)):
            for done in range(0, extend, MAX_WIDTH):
                width = min(MAX_WIDTH, extend - done)
                chains.setdefault(width, []).append((first + done, request, prefix + done))
            first += extend
        calls = []
        for width, entries in chains.items():
            starts, requests, prefixes = torch.tensor(entries, device=forward_batch.seq_lens.device).unbind(1)
            tokens = (starts[:, None] + torch.arange(width, device=starts.device)).flatten()
            calls.append(Call(width, tokens, forward_batch.req_pool_indices[requests], prefixes))
        return StepMetadata(calls=calls, extend_lens=extend_lens)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self._forward_absorbed(q, k, v, layer, forward_batch, save_kv_cache)

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
        mode = forward_batch.forward_mode
        if not mode.is_target_verify() and not self._through_op(mode):
            return self._prefill.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        if layer.qk_head_dim != LATENT + ROPE:
            return self._forward_first_chunk(q, k, v, layer)
        return self._forward_absorbed(q, k, v, layer, forward_batch, save_kv_cache)

    def _forward_absorbed(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        """q: [tokens, heads * 576]; k: [tokens, 1, 576], written to the cache. Returns [tokens, heads * 512]."""
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        kv_cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        q = q.view(-1, layer.tp_q_head_num, LATENT + ROPE)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num, LATENT)
        for call in self.forward_metadata.calls:
            whole = call.tokens is None
            part = out if whole else q.new_empty(len(call.tokens), layer.tp_q_head_num, LATENT)
            torch.ops.sgl_kernel.kdtree_mla_verify(
                q if whole else q[call.tokens],
                kv_cache,
                self.slot_table,
                call.table_rows,
                1,
                call.prefix_lens,
                call.mask,
                layer.scaling,
                1.0,
                part,
                None,
                self._workspace(call.width),
            )
            if not whole:
                out[call.tokens] = part
        return out.view(-1, layer.tp_q_head_num * LATENT)

    def _forward_first_chunk(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention
    ) -> torch.Tensor:
        """Causal attention of prompts without a cached prefix, not absorbed: plain multi-head attention.

        q, k: [tokens, heads, 192]; v: [tokens, heads, 128]. Returns [tokens, heads * 128].
        """
        heads = layer.tp_q_head_num
        q, k = (t.view(-1, heads, layer.qk_head_dim) for t in (q, k))
        v = v.view(-1, heads, layer.v_head_dim)
        # torch's fused CPU attention wants one head size; without it the scores of the whole prompt are stored.
        v = torch.nn.functional.pad(v, (0, layer.qk_head_dim - layer.v_head_dim))
        lens = self.forward_metadata.extend_lens
        outputs = []
        for one_q, one_k, one_v in zip(q.split(lens), k.split(lens), v.split(lens), strict=True):
            attended = torch.nn.functional.scaled_dot_product_attention(
                one_q.transpose(0, 1)[None],
                one_k.transpose(0, 1)[None],
                one_v.transpose(0, 1)[None],
                is_causal=True,
                scale=layer.scaling,
            )
            outputs.append(attended[0].transpose(0, 1)[..., : layer.v_head_dim])
        return torch.cat(outputs).reshape(-1, heads * layer.v_head_dim)
