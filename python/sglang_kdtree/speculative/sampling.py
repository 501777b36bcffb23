# SPDX-License-Identifier: Apache-2.0
"""The target's choice after each node of a tree: one draw a node, as plain decoding would make it there.

Source: DDTree (arXiv 2604.12989), section 3.3. A node's logits depend on its ancestors alone, so a draw from them is a
draw of plain decoding; the tree only decides whether the next draw is in the same pass.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.utils import async_h2d

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


def adjust_logits(logits: torch.Tensor, batch: ScheduleBatch, depths: torch.Tensor) -> None:
    """Custom logit processors, min_new_tokens and logit_bias, in place.

    logits: [batch * width, vocab]; depths: [batch, width] int32.
    """
    info = batch.sampling_info
    rows, width = depths.shape
    if info.has_custom_logit_processor:
        apply_custom_logit_processor(logits, info, num_tokens_in_batch=width)
    forbid_early_stops(logits.view(rows, width, -1), batch, depths)
    if info.logit_bias is not None:
        logits.view(rows, width, -1).add_(info.logit_bias[:, None])


def stop_tokens(req: Req) -> list[int]:
    """The tokens that end a request; min_new_tokens forbids them."""
    tokenizer = req.tokenizer
    tokens = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if tokenizer is not None:
        tokens |= set(tokenizer.additional_stop_token_ids or ()) | {tokenizer.eos_token_id}
    return sorted(tokens - {None})


def forbid_early_stops(logits: torch.Tensor, batch: ScheduleBatch, depths: torch.Tensor) -> None:
    """min_new_tokens: after a node that is output token number n of its request, n < min_new_tokens forbids a stop.

    logits: [batch, width, vocab], in place; depths: [batch, width] int32.
    """
    for row, req in enumerate(batch.reqs):
        wanted = req.sampling_params.min_new_tokens
        stops = stop_tokens(req) if wanted > 0 else []
        if stops:
            outputs = batch.seq_lens[row] + depths[row] + 1 - len(req.origin_input_ids)
            barred = torch.where(outputs < wanted, -torch.inf, 0.0)
            columns = async_h2d(stops, dtype=torch.int64, device=logits.device)
            logits[row, :, columns] += barred[:, None].to(logits.dtype)


def per_node(info: SamplingBatchInfo, width: int) -> SamplingBatchInfo:
    """The sampling parameters of each request, for each of its nodes. What adjust_logits has done is left out."""
    repeated = {
        name: value.repeat_interleave(width, 0)
        for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
        if (value := getattr(info, name)) is not None
    }
    return dataclasses.replace(
        info,
        **repeated,
        grammars=None,
        grammar_mask=None,
        penalizer_orchestrator=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        has_custom_logit_processor=False,
        custom_logit_processor=None,
        custom_params=None,
        logit_bias=None,
        sampling_mask_batch_indices=None,
        sampling_support_logprobs_capture_indices=None,
    )


def draw(sampler: Sampler, output: LogitsProcessorOutput, batch: ScheduleBatch, depths: torch.Tensor) -> torch.Tensor:
    """The target's token after each node, [batch, width] int64. Leaves output.next_token_logits [batch * width, vocab]
    as they are; depths: [batch, width] int32."""
    rows, width = depths.shape
    logits = output.next_token_logits
    if batch.sampling_info.is_all_greedy:
        return logits.argmax(-1).view(rows, width)
    positions = (batch.seq_lens[:, None] + depths).flatten()
    scratch = dataclasses.replace(output, next_token_logits=logits.clone())  # the sampler writes over its logits
    drawn = sampler(scratch, per_node(batch.sampling_info, width), False, [], [], positions)
    return drawn.long().view(rows, width)
