# SPDX-License-Identifier: Apache-2.0
"""What the backend serves. Everything else is refused at start-up, with the flag to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

LATENT = 512
ROPE = 64
MAX_HEADS = 128
KV_DTYPES = {
    "cpu": (torch.bfloat16, torch.float16, torch.float32),
    "cuda": (torch.bfloat16, torch.float16),
}


class UnsupportedError(ValueError):
    """The model or the server's settings are not served by kdtree_mla."""


def kernel_variant(runner: ModelRunner) -> str:
    """What runs on the runner's device, such as avx512_bf16 or sm_120. Raises UnsupportedError where nothing does."""
    device = torch.device(runner.device)
    name = "kdtree_mla_cpu_variant" if device.type == "cpu" else "kdtree_mla_cuda_variant"
    if not hasattr(torch.ops.sgl_kernel, name):
        raise UnsupportedError(
            f"this installation of sglang-kernel has no kdtree_mla kernel for the device {device.type}. Install this "
            "fork's sglang-kernel for it, or change --device."
        )
    variant = getattr(torch.ops.sgl_kernel, name)
    if device.type == "cpu":
        return variant()
    try:
        return variant(torch.cuda.current_device() if device.index is None else device.index)
    except RuntimeError as error:
        reason = str(error).splitlines()[0].removeprefix("kdtree_mla_verify: ")
        raise UnsupportedError(f"kdtree_mla cannot run on the device {runner.device}: {reason}") from error


def check_supported(runner: ModelRunner) -> None:
    """Raise UnsupportedError unless kdtree_mla serves this runner's model, cache and parallel layout."""
    from sglang.srt.runtime_context import get_parallel

    config = runner.model_config
    name = config.hf_config.architectures[0]
    device = torch.device(runner.device).type
    if not runner.use_mla_backend:
        raise UnsupportedError(
            f"kdtree_mla serves models with MLA attention (DeepSeek-V2/V3, Kimi K2); {name} has none. "
            "Use another --attention-backend, such as triton."
        )
    if (config.kv_lora_rank, config.qk_rope_head_dim) != (LATENT, ROPE):
        raise UnsupportedError(
            f"kdtree_mla serves kv_lora_rank {LATENT} with qk_rope_head_dim {ROPE}; {name} has {config.kv_lora_rank} "
            f"and {config.qk_rope_head_dim}. Use another --attention-backend, such as triton."
        )
    if getattr(config.hf_config, "index_topk", None) is not None:
        raise UnsupportedError(
            f"kdtree_mla serves dense MLA; {name} has sparse attention. Use --attention-backend dsa."
        )
    if device not in KV_DTYPES:
        raise UnsupportedError(
            f"kdtree_mla has no kernel for the device {device} in this build; it has one for {', '.join(KV_DTYPES)}. "
            "Use another --attention-backend, or --device cpu."
        )
    if runner.kv_cache_dtype not in KV_DTYPES[device]:
        served = ", ".join(str(d).removeprefix("torch.") for d in KV_DTYPES[device])
        asked = str(runner.kv_cache_dtype).removeprefix("torch.")
        raise UnsupportedError(
            f"kdtree_mla on {device} serves a KV cache in {served}, not {asked}. "
            "Change --kv-cache-dtype (auto takes the model's --dtype)."
        )
    if runner.kv_cache_dtype != runner.dtype:
        raise UnsupportedError(
            f"kdtree_mla needs the KV cache in the model's type {runner.dtype}, not {runner.kv_cache_dtype}. "
            "Use --kv-cache-dtype auto."
        )
    kernel_variant(runner)
    parallel = get_parallel()
    # On the CPU, upstream pads the heads of a model whose number does not divide; the padding is not MLA's.
    heads = getattr(config.hf_config, "original_num_attention_heads", config.num_attention_heads)
    if heads % parallel.attn_tp_size != 0 or heads // parallel.attn_tp_size > MAX_HEADS:
        raise UnsupportedError(
            f"{heads} attention heads over {parallel.attn_tp_size} TP ranks: kdtree_mla needs a whole number of heads "
            f"a rank, at most {MAX_HEADS}. Change --tp-size to a divisor of {heads}."
        )
    if parallel.dcp_enabled:
        raise UnsupportedError("kdtree_mla does not serve decode context parallelism. Remove --dcp-size.")
    if runner.kv_index_translator.is_translating:
        raise UnsupportedError("kdtree_mla does not serve the unified KV pool. Remove --enable-unified-memory.")
