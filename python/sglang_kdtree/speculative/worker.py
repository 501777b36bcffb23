# SPDX-License-Identifier: Apache-2.0
"""One round of DDTREE: draft a tree a request, verify all of it in one target forward, commit the accepted path.

Everything of a round stays on the device and has shapes that depend on the batch size alone. Ranks agree because rank
0's candidates and rank 0's target tokens are everyone's: the rest follows from them by exact arithmetic.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
from sglang.srt.speculative.draft_parallel import model_draft_parallel_spec, resolve_draft_parallel_layout
from sglang.srt.speculative.draft_worker_common import build_draft_tp_worker
from sglang.srt.speculative.spec_utils import (
    GrammarTree,
    build_grammar_vocab_mask,
    draft_pp_context,
    draft_tp_context,
)
from sglang.srt.utils import async_h2d

from sglang_kdtree.metrics import RankMetrics
from sglang_kdtree.speculative import algorithm, cpu_attention, sampling
from sglang_kdtree.speculative.drafter import BlockDrafter
from sglang_kdtree.speculative.options import TreeOptions
from sglang_kdtree.speculative.requests import refuse_unserved
from sglang_kdtree.speculative.stage_times import StageTimes
from sglang_kdtree.speculative.state import DDTreeState
from sglang_kdtree.speculative.verify_input import DDTreeVerifyInput

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

    from sglang_kdtree.speculative.trees import Trees

Publish = "Callable[[torch.Tensor], None] | None"


class DDTreeWorker(BaseSpecWorker):
    """Drives the target and the drafter; the scheduler calls forward_batch_generation."""

    def __init__(self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker) -> None:
        super().__init__()
        self._target_worker = target_worker
        self._target: ModelRunner = target_worker.model_runner
        self.device = target_worker.device
        self.width: int = get_spec().speculative_num_draft_tokens
        self.speculative_num_draft_tokens = self.width
        draft_config = self._target.spec_aux_config.draft_model_config
        self.draft_parallel_layout = resolve_draft_parallel_layout(
            model_draft_parallel_spec(draft_config, spec_algorithm=self._target.spec_algorithm), collapse_cp=True
        )
        on_cpu = torch.device(self.device).type == "cpu"
        with self._draft_scope():
            bundle = build_draft_tp_worker(
                server_args=server_args,
                gpu_id=gpu_id,
                nccl_port=nccl_port,
                target_model_config=self._target.model_config,
                algo_label="DDTREE",
                attention_backend_override=cpu_attention.NAME if on_cpu else None,
            )
        self._draft_worker = bundle.draft_worker
        self._draft_runner = bundle.draft_model_runner
        config = parse_dflash_draft_config(draft_hf_config=self._draft_runner.model_config.hf_config)
        algorithm.check_drafter(self._draft_runner, self._target, config)
        self.block = algorithm.block_of(self.width)
        bundle.draft_model.set_block_size(self.block)
        self._drafter = BlockDrafter(
            self._draft_runner,
            self._target,
            mask_token=algorithm.mask_token_of(config, target_worker.tokenizer, self._target.model_config.vocab_size),
            block=self.block,
            width=self.width,
            options=TreeOptions.from_environment(),
            scale=config.output_multiplier,
            softcap=config.final_logit_softcapping,
        )

        self._times = StageTimes(self.device)
        self._metrics = RankMetrics(self._target, get_parallel().tp_rank)
        self._metrics.width(self.width)

    def _draft_scope(self) -> Any:
        scope = contextlib.ExitStack()
        scope.enter_context(draft_pp_context())
        scope.enter_context(draft_tp_context(self.draft_parallel_layout))
        return scope

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """The scheduler calls it when a round's counts have come to the host."""
        self._metrics.round([drafts + 1 for drafts in num_correct_drafts_per_req])

    def weight_update_runners(self) -> list[tuple[str, ModelRunner]]:
        return [("draft", self._draft_runner)]

    @property
    def spec_v2_attn_backends(self) -> tuple:
        return (self._target.attn_backend, self._draft_runner.attn_backend)

    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        """The drafter has a cache of its own, whose slots have the target's numbers."""
        with draft_tp_context(self.draft_parallel_layout):
            super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)

    def init_attention_backends(self) -> None:
        with self._draft_scope():
            self._draft_worker.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        with self._draft_scope():
            capture = get_exec().graph.cuda_graph_config.decode.backend != Backend.DISABLED
            capture = capture and torch.device(self.device).type == "cuda"
            if capture:
                self._drafter.prepare_capture()
            self._draft_worker.init_cuda_graphs(capture_decode_cuda_graph=capture)

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Publish = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        """A prefill, whose last tokens' successors are the first roots, or a round."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish)
        return self._round(batch, on_publish)

    def _prefill(self, batch: ScheduleBatch, on_publish: Publish) -> GenerationBatchResult:
        refuse_unserved(batch.reqs)
        result = self._target_worker.forward_batch_generation(batch, capture_hidden_mode=CaptureHiddenMode.FULL)
        self._agree(result.next_token_ids)
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        # From pinned memory: a plain copy to a GPU would wait for the target's forward.
        starts = async_h2d(batch.prefix_lens, dtype=torch.int64, device=self.device)
        lens = async_h2d(batch.extend_lens, dtype=torch.int64, device=self.device)
        total = sum(batch.extend_lens)
        # Position of a token: its request's first new position, and its place among the new ones.
        first = (starts - lens.cumsum(0) + lens).repeat_interleave(lens, output_size=total)
        positions = first + torch.arange(total, device=self.device)
        self._drafter.remember(result.logits_output.hidden_states, batch.out_cache_loc, positions)
        result.logits_output.hidden_states = None  # large, and nobody's outside
        result.next_draft_input = DDTreeState.after(result.next_token_ids, batch.seq_lens)
        return result

    def _round(self, batch: ScheduleBatch, on_publish: Publish) -> GenerationBatchResult:
        if batch.seq_lens.device.type != "cpu":  # made on the scheduler's stream, in the overlap schedule
            batch.seq_lens.record_stream(torch.get_device_module(self.device).current_stream())
        rows, prefix_lens = len(batch.seq_lens), batch.seq_lens
        self._times.begin(rows)
        slots = assign_extend_cache_locs_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=self.req_to_token_pool.req_to_token,
            start_offset=prefix_lens,
            end_offset=prefix_lens + self.width,
            batch_size=rows,
            draft_token_num=self.width,
            device=self.device,
        )
        with self._draft_scope():
            trees = self._drafter.draft(batch, batch.spec_info.bonus_tokens, slots.view(rows, self.width))
        self._times.end_stage()
        # Copied to the host while the target runs.
        grammar_tree = None
        if batch.has_grammar:
            grammar_tree = GrammarTree.from_device(trees.next_token, trees.next_sibling, trees.tokens)

        target_result = self._verify(batch, trees, slots)
        self._times.end_stage()
        output = target_result.logits_output
        sampling.adjust_logits(output.next_token_logits, batch, trees.depths)
        if grammar_tree is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=grammar_tree,
                sampling_info=batch.sampling_info,
                device=output.next_token_logits.device,
                barrier=None,
            )
            if mask is not None:
                mask.apply(output.next_token_logits)
        drawn = self._agree(sampling.draw(self._target.sampler, output, batch, trees.depths))
        paths, counts, bonus = trees.accept(drawn, self.block)

        new_seq_lens = prefix_lens + counts
        if on_publish is not None:
            on_publish(new_seq_lens)
        tokens = torch.zeros(rows, self.width, dtype=torch.int64, device=self.device)
        tokens[:, : self.block] = drawn.gather(1, paths.clamp(min=0).long())
        if batch.return_logprob:
            first_node = torch.arange(rows, device=self.device)[:, None] * self.width
            accepted = torch.zeros_like(tokens)
            accepted[:, : self.block] = first_node + paths.clamp(min=0)
            compute_spec_logprobs(batch, output, drawn.flatten(), accept_index=accepted)
        self._times.end_stage()
        self._commit(output, paths, counts, slots.view(rows, self.width), prefix_lens)
        output.hidden_states = None
        self._times.end_stage()
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=tokens.flatten(),
            accept_lens=counts,
            can_run_cuda_graph=target_result.can_run_cuda_graph,
            next_draft_input=DDTreeState.after(bonus, new_seq_lens),
            speculative_num_draft_tokens=self.width,
            new_seq_lens=new_seq_lens,
            routed_experts_output=target_result.routed_experts_output,
            indexer_topk_output=target_result.indexer_topk_output,
        )

    def _verify(self, batch: ScheduleBatch, trees: Trees, slots: torch.Tensor) -> GenerationBatchResult:
        """The target's forward over all nodes."""
        translator = self._target.kv_index_translator
        plan = translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=batch.seq_lens_cpu,
            write_virtual=slots,
            read_extent=self.width,
        )
        batch.out_cache_loc = slots
        verify_input = DDTreeVerifyInput(
            draft_token=trees.tokens.flatten(),
            positions=(batch.seq_lens[:, None] + trees.depths).flatten(),
            draft_token_num=self.width,
            custom_mask=None,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            kv_loc_plan=plan,
            packed_mask=trees.mask,
        )
        # The attention's metadata are the forward's own to make, once.
        forward_batch, _ = verify_input.prepare_for_verify(batch, self._target_worker, defer_metadata_init=True)
        result = self._target_worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
        batch.forward_mode = ForwardMode.DECODE
        return result

    @functools.cached_property
    def _caches(self) -> tuple[torch.Tensor, int]:
        """Where the target's layers have their caches, [layers] int64, and the bytes of a slot's row in one."""
        pool = self._target.token_to_kv_pool
        layers = [pool.get_key_buffer(pool.start_layer + i) for i in range(pool.layer_num)]
        addresses = torch.tensor([layer.data_ptr() for layer in layers], device=self.device)
        return addresses, layers[0].stride(0) * layers[0].element_size()

    def _commit(
        self,
        output: Any,
        paths: torch.Tensor,
        counts: torch.Tensor,
        slots: torch.Tensor,
        prefix_lens: torch.Tensor,
    ) -> None:
        """Move the accepted path's cache rows to the front of each request's slots, and give the drafter its hidden
        states. paths: [batch, block] int32; slots: [batch, width] int64."""
        caches, row_bytes = self._caches
        torch.ops.sgl_kernel.kdtree_move_rows(caches, row_bytes, slots, paths, counts)
        nodes = paths.clamp(min=0).long()
        places = torch.arange(self.block, device=self.device)
        to = torch.where(places < counts[:, None], slots[:, : self.block], 0)
        features = output.hidden_states.view(len(slots), self.width, -1)
        chosen = features.gather(1, nodes[..., None].expand(-1, -1, features.shape[-1]))
        self._drafter.remember(chosen.flatten(0, 1), to.flatten(), (prefix_lens[:, None] + places).flatten())

    @staticmethod
    def _agree(tokens: torch.Tensor) -> torch.Tensor:
        """Rank 0's tokens, on every rank."""
        group = get_parallel().tp_group
        if group.world_size > 1:
            group.broadcast(tokens, src=0)
        return tokens
