# SPDX-License-Identifier: Apache-2.0
"""A DFlash drafter in plain torch, which trains the tiny model's drafter.

Source: DFlash (arXiv 2602.06036), sections 3 and 4. A block is the last committed token and masks; every position of it
sees the whole block and the committed tokens, whose keys and values come from the target's hidden states and not from
the drafter's own layers. Embedding and output head are the target's. Parameters carry the names that SGLang loads.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from reference import MLP, Config, ReferenceModel, rotate


class DraftAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        hidden, dim, eps = config["hidden_size"], config["head_dim"], config["rms_norm_eps"]
        self.dim = dim
        self.q_proj = nn.Linear(hidden, self.heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(self.heads * dim, hidden, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(dim, eps), nn.RMSNorm(dim, eps)

    def keys_values(self, x: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.dim)))
        return rotate(k, angles), self.v_proj(x).unflatten(-1, (self.kv_heads, self.dim))

    def forward(
        self,
        x: torch.Tensor,
        angles: torch.Tensor,
        context: torch.Tensor,
        context_angles: torch.Tensor,
        visible: torch.Tensor,
    ) -> torch.Tensor:
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.dim))), angles)
        pairs = zip(self.keys_values(context, context_angles), self.keys_values(x, angles), strict=True)
        k, v = (torch.cat(pair, 1) for pair in pairs)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class DraftLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = MLP(hidden, config["intermediate_size"])

    def forward(self, x: torch.Tensor, *attention: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """DFlashDraftModel."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config["num_hidden_layers"]))
        self.fc = nn.Linear(len(config["dflash_config"]["target_layer_ids"]) * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = nn.RMSNorm(hidden, eps), nn.RMSNorm(hidden, eps)

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.float32) -> Drafter:
        from safetensors.torch import load_file

        model = cls(json.loads((folder / "config.json").read_text()))
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model.to(dtype).eval()

    @property
    def block(self) -> int:
        return self.config["dflash_config"]["block_size"]

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        dim = self.config["head_dim"]
        steps = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device)
        return positions[..., None].float() * self.config["rope_theta"] ** (-steps / dim)

    def features(self, target: ReferenceModel, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of tokens [batch, length]: the target's hidden states after its layers target_layer_ids, side by side,
        [batch, length, layers * hidden]; and its logits [batch, length, vocab]."""
        wanted, found = self.config["dflash_config"]["target_layer_ids"], {}
        hooks = [
            target.model.layers[i].register_forward_hook(lambda _m, _in, out, i=i: found.__setitem__(i, out))
            for i in wanted
        ]
        logits = target(tokens)
        for hook in hooks:
            hook.remove()
        return torch.cat([found[i] for i in wanted], -1), logits

    def forward(
        self, target: ReferenceModel, features: torch.Tensor, anchors: torch.Tensor, roots: torch.Tensor
    ) -> torch.Tensor:
        """Logits of the positions after each anchor.

        features: [batch, length, layers * hidden], of the tokens from position 0 on. anchors: [blocks] int64, the
        positions at which blocks begin; a block sees the features before its anchor. roots: [batch, blocks] int64, the
        tokens at the anchors. Returns [batch, blocks, block - 1, vocab].
        """
        block, length = self.block, features.shape[1]
        mask = self.config["dflash_config"]["mask_token_id"]
        ids = torch.full((*roots.shape, block), mask, dtype=torch.int64, device=roots.device)
        ids[..., 0] = roots
        x = target.model.embed_tokens(ids.flatten(1))
        context = self.hidden_norm(self.fc(features))
        places = torch.arange(length, device=features.device)
        positions = (anchors[:, None] + torch.arange(block, device=anchors.device)).flatten()
        owner = torch.arange(len(anchors), device=anchors.device).repeat_interleave(block)
        visible = torch.cat((places < anchors[owner][:, None], owner == owner[:, None]), 1)
        for layer in self.layers:
            x = layer(x, self.angles(positions), context, self.angles(places), visible)
        x = self.norm(x).unflatten(1, (len(anchors), block))
        return target.lm_head(x[:, :, 1:])
