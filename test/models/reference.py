# SPDX-License-Identifier: Apache-2.0
"""A DeepSeek-V3 forward in plain torch: what trains the tiny model, and what the server's tokens are compared with.

It shares no code with SGLang or with this fork's backend: attention is not absorbed and there is no cache. Parameters
carry the checkpoint's names. Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1; YaRN (arXiv 2309.00071), section 3.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Config = dict[str, Any]


def rope_frequencies(config: Config) -> torch.Tensor:
    """YaRN frequencies [qk_rope_head_dim / 2], float32."""
    dim, base, yarn = config["qk_rope_head_dim"], config["rope_theta"], config["rope_scaling"]
    plain = base ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)

    def dim_of_rotations(rotations: float) -> float:
        length = yarn["original_max_position_embeddings"]
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dim_of_rotations(yarn["beta_fast"])), 0)
    high = min(math.ceil(dim_of_rotations(yarn["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain * (1 - ramp) + plain / yarn["factor"] * ramp


def softmax_scale(config: Config) -> float:
    yarn = config["rope_scaling"]
    mscale = 0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1.0
    return (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5 * mscale * mscale


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate adjacent pairs of x [..., length, heads, dim] by angles [length, dim / 2]."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        hidden, heads, eps = config["hidden_size"], config["num_attention_heads"], config["rms_norm_eps"]
        nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
        latent, q_rank = config["kv_lora_rank"], config["q_lora_rank"]
        self.q_a_proj = nn.Linear(hidden, q_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(q_rank, eps)
        self.q_b_proj = nn.Linear(q_rank, heads * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, latent + rope, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(latent, eps)
        self.kv_b_proj = nn.Linear(latent, heads * (nope + value), bias=False)
        self.o_proj = nn.Linear(heads * value, hidden, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        c = self.config
        heads, nope, rope = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (heads, nope + rope))
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c["kv_lora_rank"], rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, nope + c["v_head_dim"]))
        k_nope, v = kv.split([nope, c["v_head_dim"]], -1)
        q = torch.cat((q[..., :nope], rotate(q[..., nope:], angles)), -1)
        k_rope = rotate(k_rope[..., None, :], angles).expand(*k_nope.shape[:-1], rope)
        k = torch.cat((k_nope, k_rope), -1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=softmax_scale(c))
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config["n_routed_experts"], config["hidden_size"]))
        # Moves the choice of experts, not their weights; balanced during training, without a gradient.
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config["n_routed_experts"]), requires_grad=False)


class MoE(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        hidden, intermediate = config["hidden_size"], config["moe_intermediate_size"]
        self.gate = Gate(config)
        self.experts = nn.ModuleList(MLP(hidden, intermediate) for _ in range(config["n_routed_experts"]))
        self.shared_experts = MLP(hidden, intermediate * config["n_shared_experts"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.sigmoid(F.linear(x.float(), self.gate.weight.float()))
        chosen = torch.topk(scores + self.gate.e_score_correction_bias, self.config["num_experts_per_tok"]).indices
        self.load = torch.bincount(chosen.flatten(), minlength=len(self.experts)) if self.training else None
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        weights = weights / weights.sum(-1, keepdim=True) * self.config["routed_scaling_factor"]
        out = self.shared_experts(x)
        for number, expert in enumerate(self.experts):
            if self.training:  # all tokens through all experts: few and small, and no host sync
                out = out + expert(x) * weights[..., number, None].to(x.dtype)
            else:
                taken = weights[..., number] > 0
                out[taken] += expert(x[taken]) * weights[..., number, None][taken].to(x.dtype)
        return out


class Layer(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        dense = index < config["first_k_dense_replace"]
        self.mlp = MLP(hidden, config["intermediate_size"]) if dense else MoE(config)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])


class ReferenceModel(nn.Module):
    """DeepseekV3ForCausalLM. forward: tokens [batch, length] int64 -> logits [batch, length, vocab]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.float32) -> ReferenceModel:
        from safetensors.torch import load_file

        model = cls(json.loads((folder / "config.json").read_text()))
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model.to(dtype).eval()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], dtype=torch.float32, device=tokens.device)
        angles = positions[:, None] * rope_frequencies(self.config).to(tokens.device)
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, angles)
        return self.lm_head(self.model.norm(x))

    @torch.no_grad()
    def generate(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        """`count` greedy tokens after the prompt (end-of-text does not stop it), and at each the gap between the two
        best logits: where it is below the arithmetic's noise, another implementation may choose otherwise."""
        tokens, gaps = list(prompt), []
        for _ in range(count):
            best = self(torch.tensor([tokens]))[0, -1].topk(2)
            tokens.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
        return tokens[len(prompt) :], gaps
