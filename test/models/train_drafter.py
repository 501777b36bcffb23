# SPDX-License-Identifier: Apache-2.0
"""Train the tiny model's DFlash drafter, on the text that the tiny model was trained on and the target's hidden states.

    python test/models/train_drafter.py --out test/models/tiny-mla-dflash [--device cuda] [--steps 4000]
        [--rollouts 8192]

With --rollouts, half of every batch is text that the target wrote itself, which is what it is asked to draft; a GPU
writes it in minutes. Writes config.json, model.safetensors (bf16) and training.json.

The loss is the divergence from the target's own distribution, weighted down with the distance from the anchor (DFlash,
arXiv 2602.06036, section 4: an error near the anchor ends the block). Prints how far a chain of the drafter follows the
target's greedy choice on held-out text. Seeded; another device or torch version gives other weights of the same
quality.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from drafter import Drafter
from safetensors.torch import save_file
from tokenizers import Tokenizer

from reference import ReferenceModel
from train import MASK, VOCAB, encode, read_corpus

TARGET = Path(__file__).resolve().parent / "tiny-mla"
BLOCK = 16
CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 448,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_is_neox_style": False,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "block_size": BLOCK,
    "num_target_layers": 4,
    "dflash_config": {
        "mask_token_id": MASK,
        "target_layer_ids": [0, 1, 2],
        "block_size": BLOCK,
        "num_target_layers": 4,
    },
}


@torch.no_grad()
def write_rollouts(target: ReferenceModel, stream: torch.Tensor, args: argparse.Namespace) -> torch.Tensor:
    """[rollouts, length]: the beginning of a window of the text, and how the target goes on; every other one greedy,
    the rest drawn at temperature 0.7. Without a cache: the model is small."""
    generator = torch.Generator().manual_seed(args.seed + 2)
    written = []
    for first in range(0, args.rollouts, 64):
        count = min(64, args.rollouts - first)
        start = int(torch.randint(16, args.length // 2, (1,), generator=generator))
        tokens = windows(stream, count, args.length, generator)
        for end in range(start, args.length):
            with torch.autocast(args.device, torch.bfloat16):
                logits = target(tokens[:, :end])[:, -1].float()
            drawn = torch.multinomial((logits / 0.7).softmax(-1), 1)[:, 0]
            drawn[::2] = logits[::2].argmax(-1)
            tokens[:, end] = drawn
        written.append(tokens)
    return torch.cat(written)


def windows(stream: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """[count, length] int64, from random places of the stream."""
    starts = torch.randint(0, len(stream) - length, (count,), generator=generator)
    return stream[starts.to(stream.device)[:, None] + torch.arange(length, device=stream.device)].long()


def batch_of(
    stream: torch.Tensor, rollouts: torch.Tensor | None, args: argparse.Namespace, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [batch, length] and anchors [blocks], each block of which ends inside."""
    tokens = windows(stream, args.batch, args.length, generator)
    if rollouts is not None:
        chosen = torch.randint(0, len(rollouts), (args.batch // 2,), generator=generator)
        tokens[: args.batch // 2] = rollouts[chosen.to(rollouts.device)]
    anchors = torch.randperm(args.length - BLOCK - 1, generator=generator)[: args.blocks] + 1
    return tokens, anchors.to(stream.device)


def rows_after(anchors: torch.Tensor) -> torch.Tensor:
    """[blocks, block - 1]: where the target's logits of a block's tokens stand, one before the token."""
    return anchors[:, None] + torch.arange(BLOCK - 1, device=anchors.device)


def train(
    drafter: Drafter,
    target: ReferenceModel,
    stream: torch.Tensor,
    rollouts: torch.Tensor | None,
    args: argparse.Namespace,
) -> None:
    generator = torch.Generator().manual_seed(args.seed)
    matrices = [p for p in drafter.parameters() if p.dim() == 2]
    vectors = [p for p in drafter.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=args.device == "cuda")
    weights = torch.exp(-torch.arange(BLOCK - 1, device=args.device) / 7.0)
    started = time.time()
    for step in range(args.steps):
        warm, progress = min(1.0, (step + 1) / 100), step / args.steps
        for group in optimiser.param_groups:
            group["lr"] = args.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        tokens, anchors = batch_of(stream, rollouts, args, generator)
        with torch.no_grad(), torch.autocast(args.device, torch.bfloat16):
            features, wanted = drafter.features(target, tokens)
        wanted = wanted[:, rows_after(anchors)].float()
        with torch.autocast(args.device, torch.bfloat16):
            logits = drafter(target, features, anchors, tokens[:, anchors])
        cross = -(wanted.softmax(-1) * F.log_softmax(logits.float(), -1)).sum(-1)
        loss = (cross * weights).sum(-1).mean() / weights.sum()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 0 or step == args.steps - 1:
            print(f"step {step} loss {loss.item():.4f} {time.time() - started:.0f} s", flush=True)


@torch.no_grad()
def greedy_agreement(drafter: Drafter, target: ReferenceModel, stream: torch.Tensor, args: argparse.Namespace) -> float:
    """Mean number of a chain's tokens, root included, that agree with the target's choice after the real text."""
    generator = torch.Generator().manual_seed(args.seed + 1)
    lengths = []
    for _ in range(16):
        tokens, anchors = batch_of(stream, None, args, generator)
        features, wanted = drafter.features(target, tokens)
        agreed = drafter(target, features, anchors, tokens[:, anchors]).argmax(-1) == wanted[
            :, rows_after(anchors)
        ].argmax(-1)
        lengths.append(1 + agreed.cumprod(-1).sum(-1).float().mean().item())
    return sum(lengths) / len(lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny model's DFlash drafter.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=24, help="blocks a sequence")
    parser.add_argument("--rollouts", type=int, default=0, help="texts of the target's own to train on too")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)

    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    train_texts, held_out_texts = read_corpus(args.stdlib)
    stream = encode(tokenizer, train_texts).to(args.device)
    held_out = encode(tokenizer, held_out_texts).to(args.device)
    target = ReferenceModel.load(TARGET).to(args.device).requires_grad_(False)
    drafter = Drafter(CONFIG).to(args.device)
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    rollouts = write_rollouts(target, stream, args) if args.rollouts else None
    train(drafter, target, stream, rollouts, args)

    weights = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in drafter.state_dict().items()}
    save_file(weights, args.out / "model.safetensors", metadata={"format": "pt"})
    drafter.load_state_dict({name: t.float() for name, t in weights.items()})
    agreement = greedy_agreement(drafter.eval(), target, held_out, args)
    parameters = sum(t.numel() for t in weights.values())
    print(f"{parameters / 1e6:.2f} M parameters; a chain agrees with held-out text for {agreement:.2f} tokens")
    (args.out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    facts = {"held_out_agreement": round(agreement, 3), "parameters": parameters}
    facts |= {name: getattr(args, name) for name in ("steps", "batch", "length", "blocks", "rollouts", "lr", "seed")}
    facts |= {"torch": torch.__version__, "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu"}
    (args.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
