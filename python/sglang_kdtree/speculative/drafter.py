# SPDX-License-Identifier: Apache-2.0
"""The DFlash drafter: one forward of a block gives every position's distribution, and those the tree.

Source: DFlash (arXiv 2602.06036), section 3; DDTree (arXiv 2604.12989), section 3. The drafter has no embedding and no
head of its own, it borrows the target's. Its keys and values of committed tokens come from the target's hidden states
(`remember`), in slots that have the numbers of the target's.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed.communication_op import tensor_model_parallel_all_gather
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_exec, get_parallel
from sglang.srt.speculative.draft_worker_common import make_draft_block_spec_info, make_draft_sampler_capture_hook

from sglang_kdtree.speculative.trees import Trees

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_kdtree.speculative.options import TreeOptions

logger = logging.getLogger(__name__)


class Head:
    """The target's output head on the drafter's hidden states: each position's likeliest tokens.

    Every rank has a shard of the vocabulary. The shards' candidates are gathered and merged, and so the same on all
    ranks; broadcast from rank 0 besides, as hidden states may differ by rounding.
    """

    def __init__(self, lm_head: torch.nn.Module, top_k: int, scale: float, softcap: float | None) -> None:
        shard = lm_head.shard_indices
        self._weight = lm_head.weight[: shard.num_org_elements]
        self._first_id = shard.org_vocab_start_index
        self._top_k = min(top_k, lm_head.org_vocab_size)
        self._scale, self._softcap = scale, softcap

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden: [batch, positions, hidden]. Returns log_probs [batch, positions, top_k] fp32, of the whole
        vocabulary's softmax, likeliest first, and token_ids [batch, positions, top_k] int64."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        logits = torch.matmul(rows.to(self._weight.dtype), self._weight.T)
        if self._scale != 1.0:
            logits *= self._scale
        if self._softcap is not None:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        log_probs, ids = self._top_k_of(logits)
        shape = (*hidden.shape[:-1], -1)
        return log_probs.view(shape), ids.view(shape)

    def _top_k_of(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits: [rows, this rank's tokens]. Returns log_probs and token ids [rows, top_k] of the whole vocabulary."""
        rows, device = len(logits), logits.device
        count = min(self._top_k, logits.shape[1])
        log_probs = torch.empty(rows, count, dtype=torch.float32, device=device)
        ids = torch.empty(rows, count, dtype=torch.int64, device=device)
        normalisers = torch.empty(rows, dtype=torch.float32, device=device)
        torch.ops.sgl_kernel.kdtree_top_k(logits, self._first_id, log_probs, ids, normalisers)
        group = get_parallel().tp_group
        if group.world_size == 1:
            return log_probs, ids
        values = tensor_model_parallel_all_gather(log_probs + normalisers[:, None], dim=-1)
        ids = tensor_model_parallel_all_gather(ids, dim=-1)
        normaliser = torch.logsumexp(tensor_model_parallel_all_gather(normalisers[:, None], dim=-1), -1, keepdim=True)
        values, chosen = torch.topk(values, self._top_k, -1)
        log_probs, ids = (values - normaliser).contiguous(), ids.gather(-1, chosen).contiguous()
        group.broadcast(log_probs, src=0)
        group.broadcast(ids, src=0)
        return log_probs, ids


class TreeSampler:
    """From a block's hidden states to its trees, in buffers that stay where they are: the last part of the drafter's
    CUDA graphs."""

    def __init__(self, head: Head, options: TreeOptions, block: int, width: int, max_batch: int, device: Any) -> None:
        self._head, self._options, self._block = head, options, block
        self.trees = Trees.empty(max_batch, width, device)

    def __call__(self, hidden: torch.Tensor, block_ids: torch.Tensor) -> None:
        """hidden: [batch * block, hidden]; block_ids: [batch * block] int64, each block's first token its root."""
        blocks = hidden.view(-1, self._block, hidden.shape[-1])
        log_probs, ids = self._head(blocks[:, 1:])
        roots = block_ids.view(-1, self._block)[:, 0].contiguous()
        options = self._options
        self.trees.first(len(blocks)).build(log_probs, ids, roots, options.spine, options.min_log_prob)


class ContextWriter:
    """Writes committed tokens' keys and values into the drafter's cache, from the target's hidden states."""

    def __init__(self, runner: ModelRunner) -> None:
        self._model, self._pool = runner.model, runner.token_to_kv_pool
        self._fused = self._make_fused(runner)

    def _make_fused(self, runner: ModelRunner) -> Any:
        """Upstream's fused projection, norm and rotation of all layers, or None where it does not serve the model."""
        if torch.device(runner.device).type != "cuda" or not getattr(self._model, "supports_fused_context_kv", True):
            return None
        from sglang.kernels.ops.speculative.fused_kv_materialize import FusedKVMaterializeHelper
        from sglang.srt.speculative.dflash_utils import can_dflash_use_fused_qkv_proj

        attention = [layer.self_attn for layer in self._model.layers]
        scales = [getattr(a.attn, name, None) for a in attention for name in ("k_scale", "v_scale")]
        if any(scale not in (None, 1.0) for scale in scales):
            return None
        if not all(can_dflash_use_fused_qkv_proj(a.qkv_proj)[0] for a in attention):
            return None
        try:
            return FusedKVMaterializeHelper(
                layers=self._model.layers,
                rotary_emb=attention[0].rotary_emb,
                num_kv_heads=attention[0].num_kv_heads,
                head_dim=attention[0].head_dim,
                device=runner.device,
                max_position_hint=runner.model_config.context_len + runner.model.block_size,
            )
        except (NotImplementedError, ValueError) as error:
            logger.info("kdtree_mla: DDTREE writes the drafter's cache layer by layer (%s)", error)
            return None

    def __call__(self, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """hidden: [tokens, layers * hidden]; slots, positions: [tokens] int64. Slot 0 is nobody's: what is to be thrown
        away goes there."""
        context = self._model.project_target_hidden(hidden)
        if self._fused is not None:

            def write(index: int, k: torch.Tensor, v: torch.Tensor) -> None:
                self._write(self._model.layers[index].self_attn, slots, k, v)

            self._fused.materialize(ctx_hidden=context, positions=positions, write_layer_kv=write)
            return
        for layer in self._model.layers:
            attention = layer.self_attn
            k, v = attention.kv_proj_only(self._model.prepare_context_hidden_for_kv(layer, context))
            k = attention.apply_k_rope(positions, attention.apply_k_norm(k))
            shape = (-1, attention.num_kv_heads, attention.head_dim)
            self._write(attention, slots, k.view(shape), v.view(shape))

    def _write(self, attention: Any, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        layer = attention.attn
        self._pool.set_kv_buffer(layer, KVWriteLoc(slots, physical=True), k, v, layer.k_scale, layer.v_scale)


class BlockDrafter:
    """Drafts the trees of a batch.

    block: positions of a block, the root's included; at most `width`, as no tree of `width` nodes is deeper.
    """

    def __init__(
        self,
        runner: ModelRunner,
        target: ModelRunner,
        *,
        mask_token: int,
        block: int,
        width: int,
        options: TreeOptions,
        scale: float,
        softcap: float | None,
    ) -> None:
        self._runner, self._target = runner, target
        self._mask_token, self.block, self._width, self._options = mask_token, block, width, options
        self._offsets = torch.arange(block, device=runner.device)
        self._spec = make_draft_block_spec_info(draft_token_num=block, device=runner.device)
        candidates = min(width - 1, options.branching or width)
        self._head = Head(target.model.lm_head, candidates, scale, softcap)
        # Upstream's own door for a drafter without an embedding; embeddings that are handed in it turns into bf16.
        runner.model.forward_embed = self._embed
        self._embed_scale = 1.0
        if hasattr(target.model, "get_dflash_noise_embedding_scale"):
            self._embed_scale = float(target.model.get_dflash_noise_embedding_scale())
        self._sampler: TreeSampler | None = None
        self._remember: ContextWriter | None = None

    def _make_sampler(self, max_batch: int) -> TreeSampler:
        return TreeSampler(self._head, self._options, self.block, self._width, max_batch, self._runner.device)

    def _embed(self, block_ids: torch.Tensor) -> torch.Tensor:
        embeds = self._target.model.get_input_embeddings()(block_ids)
        return embeds if self._embed_scale == 1.0 else embeds * self._embed_scale

    def prepare_capture(self) -> None:
        """Before the drafter's CUDA graphs are captured: they end with the trees."""
        self._sampler = self._make_sampler(max(get_exec().graph.cuda_graph_config.decode.bs))
        self._runner.capture_tail_hooks.append(make_draft_sampler_capture_hook(self._sampler))

    def draft(self, batch: ScheduleBatch, roots: torch.Tensor, slots: torch.Tensor) -> Trees:
        """roots: [batch] int64, the last committed tokens. slots: [batch, width] int64, where the tokens after the
        committed ones go; the first `block` of each request serve as the block's until the tree is verified."""
        rows = len(roots)
        block_ids = torch.full((rows, self.block), self._mask_token, dtype=torch.int64, device=roots.device)
        block_ids[:, 0] = roots
        forward = self._forward_batch(batch, block_ids, slots[:, : self.block].flatten())
        with torch.inference_mode():
            output = self._runner.forward(forward)
        if output.can_run_graph and self._sampler is not None:
            return self._sampler.trees.first(rows)
        hidden: LogitsProcessorOutput = output.logits_output
        eager = self._make_sampler(rows)
        eager(hidden.hidden_states[: rows * self.block], block_ids.flatten())
        return eager.trees

    def _forward_batch(self, batch: ScheduleBatch, block_ids: torch.Tensor, slots: torch.Tensor) -> ForwardBatch:
        rows, block = block_ids.shape
        # An upper bound of the lengths, for backends that plan on the host.
        lens = batch.seq_lens_cpu + block if batch.seq_lens_cpu is not None else batch.spec_info.nxt_kv_lens_cpu
        forward = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=rows,
            input_ids=block_ids.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=slots,
            seq_lens_sum=int(lens.sum()),
            seq_lens_cpu=lens,
            positions=(batch.seq_lens[:, None] + self._offsets).flatten(),
            spec_algorithm=self._runner.spec_algorithm,
            spec_info=self._spec,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            global_num_token_non_padded_cpu=rows * block,
            can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
        )
        translator = self._runner.kv_index_translator
        plan = translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=lens,
            write_virtual=slots,
            read_extent=block,
        )
        plan.bind(forward, translator)
        return forward

    def remember(self, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Give the drafter the target's hidden states [tokens, layers * hidden] of committed tokens."""
        if self._remember is None:
            self._remember = ContextWriter(self._runner)
        self._remember(hidden, slots, positions)
