# SPDX-License-Identifier: Apache-2.0
"""DDTREE as SGLang sees it: its place among the speculative algorithms, its settings, what it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.choices import DRAFT_ATTENTION_BACKEND_CHOICES
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_kdtree.speculative.options import TreeOptions

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.dflash_utils import DFlashDraftConfig

NAME = "DDTREE"
BACKEND = "kdtree_mla"
MAX_WIDTH = 256
DEFAULT_BLOCK = 16
DEFAULT_RUNNING_REQUESTS = 48  # upstream's for speculative decoding


class DDTreeAlgorithm(CustomSpecAlgo):
    """A member of upstream's DFlash family: its drafter, its features of the target and its caches are DFlash's."""

    verifies_trees = True  # read by the attention backend when it captures a graph

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def create_future_map(self, device: Any, req_to_token_pool: Any, *needs: bool, **named_needs: bool) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, *needs, **named_needs)

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        return block_of(num_draft_tokens) if is_draft_worker else num_draft_tokens

    def handle_server_args(self, server_args: ServerArgs) -> None:
        """Refuse what DDTREE does not serve, with ValueError, and fill in what was left open."""
        refuse_settings(server_args)
        # Upstream's accounting reads both; a tree has neither steps nor a fixed fan-out.
        server_args.speculative_num_steps = 1
        server_args.speculative_eagle_topk = 1
        if server_args.speculative_dflash_block_size is None:
            server_args.speculative_dflash_block_size = drafter_block(server_args)
        if server_args.speculative_dflash_block_size < 2:
            raise ValueError(
                f"DDTREE needs blocks of at least 2 positions, not {server_args.speculative_dflash_block_size}. "
                "Change --speculative-dflash-block-size."
            )
        if server_args.speculative_num_draft_tokens is None:
            server_args.speculative_num_draft_tokens = server_args.speculative_dflash_block_size
        if server_args.speculative_draft_attention_backend is None and server_args.device != "cpu":
            server_args.speculative_draft_attention_backend = "triton"
        if server_args.max_running_requests is None:
            server_args.max_running_requests = DEFAULT_RUNNING_REQUESTS


def block_of(width: int) -> int:
    """Positions of a draft block: the drafter's, but no more than a tree of `width` nodes can be deep."""
    return min(get_spec().speculative_dflash_block_size, width)


def drafter_block(server_args: ServerArgs) -> int:
    """The block size that the drafter's config names."""
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(
        server_args.speculative_draft_model_path,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.speculative_draft_model_revision,
    )
    return parse_dflash_draft_config(draft_hf_config=config).resolve_block_size(default=DEFAULT_BLOCK)


def refuse_settings(args: ServerArgs) -> None:
    """Raise ValueError that names the flag to change, unless DDTREE serves the settings."""
    TreeOptions.from_environment()
    backends = {args.attention_backend, args.decode_attention_backend} - {None}
    if backends != {BACKEND} or args.prefill_attention_backend not in (None, BACKEND):
        raise ValueError(f"DDTREE verifies trees with {BACKEND} alone. Use --attention-backend {BACKEND}.")
    if args.speculative_draft_model_path is None:
        raise ValueError("DDTREE needs a DFlash drafter. Set --speculative-draft-model-path.")
    width = args.speculative_num_draft_tokens
    if width is not None and not 2 <= width <= MAX_WIDTH:
        raise ValueError(
            f"DDTREE verifies 2 to {MAX_WIDTH} tokens a request, the root included, not {width}. "
            "Change --speculative-num-draft-tokens."
        )
    draft_backend = args.speculative_draft_attention_backend
    if draft_backend is not None and draft_backend not in DRAFT_ATTENTION_BACKEND_CHOICES:
        served = ", ".join(DRAFT_ATTENTION_BACKEND_CHOICES)
        raise ValueError(
            f"{draft_backend} does not serve drafters. Change --speculative-draft-attention-backend to one of {served}."
        )
    refused = {
        "--enable-dp-attention": args.enable_dp_attention,
        "--disaggregation-mode": args.disaggregation_mode not in (None, "null"),
        "--pp-size": args.pp_size > 1,
        "--enable-two-batch-overlap": args.enable_two_batch_overlap,
        "--speculative-use-rejection-sampling": args.speculative_use_rejection_sampling,
        "--speculative-draft-window-size": args.speculative_draft_window_size is not None,
        "--speculative-adaptive": args.speculative_adaptive,
        "--enable-lora": bool(args.enable_lora),
    }
    for flag, is_set in refused.items():
        if is_set:
            raise ValueError(f"DDTREE does not serve {flag}. Remove it.")


def check_drafter(drafter: ModelRunner, target: ModelRunner, config: DFlashDraftConfig) -> None:
    """Raise ValueError unless the loaded drafter and target fit together."""
    model, width = drafter.model, target.model_config.vocab_size
    if config.is_domino or getattr(model, "candidate_selector", None) is not None or getattr(model, "lilicorr", None):
        raise ValueError(
            "the drafter draws its tokens one after the other (a selector, Domino or LiLiCorr head), and a tree needs "
            "each position's distribution. Set --speculative-draft-model-path to a plain DFlash drafter."
        )
    vocabulary = getattr(drafter.model_config.hf_config, "vocab_size", None)
    if vocabulary is not None and vocabulary != width:
        raise ValueError(
            f"the drafter's vocabulary has {vocabulary} tokens and the target's {width}. "
            "Set --speculative-draft-model-path to a drafter of this target."
        )
    hidden = target.model_config.hidden_size
    if drafter.model_config.hidden_size != hidden:
        raise ValueError(
            f"the drafter's hidden size is {drafter.model_config.hidden_size} and the target's {hidden}, whose "
            "embedding and head it borrows. Set --speculative-draft-model-path to a drafter of this target."
        )
    head = getattr(target.model, "lm_head", None)
    weight = getattr(head, "weight", None)
    if weight is None or not weight.is_floating_point() or weight.element_size() < 2:
        raise ValueError(
            "DDTREE reads the target's output head as a dense fp32, bf16 or fp16 matrix; this target's is quantized. "
            "Use a checkpoint whose lm_head is not."
        )
    if head.shard_indices.num_added_elements:
        raise ValueError("DDTREE does not serve a target whose vocabulary was extended after training.")


def mask_token_of(config: DFlashDraftConfig, tokenizer: Any, vocab_size: int) -> int:
    """The id of the drafter's mask token. Raises ValueError if it has none in the target's vocabulary."""
    token = config.mask_token_id
    if token is None and tokenizer is not None:
        token = tokenizer.get_vocab().get(config.mask_token)
    if token is None or token >= vocab_size:
        raise ValueError(
            f"the drafter's mask token {config.mask_token!r} (dflash_config.mask_token_id {config.mask_token_id}) is "
            f"not in the target's vocabulary of {vocab_size} tokens. Set --speculative-draft-model-path to a drafter "
            "of this target."
        )
    return token
