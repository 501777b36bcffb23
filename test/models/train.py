# SPDX-License-Identifier: Apache-2.0
"""Train the tiny model of the tests on text that ships with Python: the standard library's sources and documentation.

    python test/models/train.py --out test/models/tiny-mla [--device cuda] [--steps 5000] [--stdlib DIR]

Writes config.json, model.safetensors (bf16), the tokenizer and training.json; prints held-out bits per byte. One file
in twenty, by a hash of its name, is held out. Seeded; a run on another device or torch version gives other weights of
the same quality. The tokenizer is a byte-level BPE trained on the same text.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from reference import MoE, ReferenceModel

SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|mask|>"]
BOS, EOS, PAD, USER, ASSISTANT, MASK = range(len(SPECIAL))
VOCAB = 2048
CHAT_TEMPLATE = (
    "<|bos|>{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>{{ m['content'] }}<|eos|>"
    "{% else %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 192,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 163840,
    "initializer_range": 0.02,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "num_nextn_predict_layers": 0,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "torch_dtype": "bfloat16",
}


def docstring_dialogues(source: str, name: str) -> list[str]:
    """Questions and answers about a module's documented functions and classes, in the chat template's form."""
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    dialogues = []
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            dialogues.append(f"<|user|>What does the {kind} {node.name} of {name} do?<|assistant|>{text}<|eos|>")
    return dialogues


def is_held_out(relative: Path) -> bool:
    """One file in twenty, by the hash of its path below the standard library's folder."""
    return hashlib.sha256(str(relative).encode()).digest()[0] % 20 == 0


def read_corpus(stdlib: Path) -> tuple[list[str], list[str]]:
    """Training and held-out documents."""
    train: list[str] = []
    held_out: list[str] = []
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        if "site-packages" in relative.parts or ("lib2to3" in relative.parts and "data" in relative.parts):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if not text.strip():
            continue
        if relative.name == "topics.py":  # the language reference, as pydoc ships it: a dict of plain texts
            texts = list(ast.literal_eval(text[text.index("{") :]).values())
        else:
            texts = [text, *docstring_dialogues(text, relative.with_suffix("").as_posix().replace("/", "."))]
        (held_out if is_held_out(relative) else train).extend(texts)
    return train, held_out


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """All documents as one stream, each between <|bos|> and <|eos|>."""
    stream: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        stream += [BOS, *encoding.ids] if encoding.ids[-1] == EOS else [BOS, *encoding.ids, EOS]
    return torch.tensor(stream, dtype=torch.int32)


@torch.no_grad()
def bits_per_byte(model: ReferenceModel, tokenizer: Tokenizer, texts: list[str], device: str, length: int) -> float:
    """Of whole documents, each in windows of `length` tokens that start without context."""
    nats, size = 0.0, 0
    for text in texts:
        ids = torch.tensor([BOS, *tokenizer.encode(text).ids], device=device)
        size += len(text.encode())
        for start in range(0, len(ids) - 1, length):
            window = ids[start : start + length + 1].long()
            logits = model(window[None, :-1])[0].float()
            nats += F.cross_entropy(logits, window[1:], reduction="sum").item()
    return nats / math.log(2) / size


def initialise(model: ReferenceModel) -> None:
    into_residual = 0.02 / math.sqrt(2 * model.config["num_hidden_layers"])
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=into_residual if "o_proj" in name or "down" in name else 0.02)


def train(model: ReferenceModel, stream: torch.Tensor, args: argparse.Namespace) -> None:
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() == 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=args.device == "cuda")
    generator = torch.Generator().manual_seed(args.seed)
    stream = stream.to(args.device)
    offsets = torch.arange(args.length + 1, device=args.device)
    moes = [m for m in model.modules() if isinstance(m, MoE)]
    started = time.time()
    for step in range(args.steps):
        warm, progress = min(1.0, (step + 1) / 200), step / args.steps
        for group in optimiser.param_groups:
            group["lr"] = args.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        starts = torch.randint(0, len(stream) - args.length - 1, (args.batch,), generator=generator)
        batch = stream[starts.to(args.device)[:, None] + offsets].long()
        with torch.autocast(args.device, torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        for moe in moes:  # DeepSeek-V3, section 2.1.2: auxiliary-loss-free balancing
            load = moe.load.float()
            moe.gate.e_score_correction_bias.data += 1e-3 * torch.sign(load.mean() - load)
        if step % 200 == 0 or step == args.steps - 1:
            print(f"step {step} loss {loss.item():.4f} {time.time() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny MLA model of the tests.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)

    train_texts, held_out_texts = read_corpus(args.stdlib)
    tokenizer = train_tokenizer(train_texts)
    stream = encode(tokenizer, train_texts)
    print(f"{len(train_texts)} documents, {len(stream)} tokens; {len(held_out_texts)} held out", flush=True)

    model = ReferenceModel(CONFIG)
    initialise(model)
    model.to(args.device).train()
    train(model, stream, args)
    weights = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in model.state_dict().items()}
    gate = "mlp.gate.e_score_correction_bias"
    weights = {name: t.float() if name.endswith(gate) else t for name, t in weights.items()}
    save_file(weights, args.out / "model.safetensors", metadata={"format": "pt"})

    # What is shipped is measured: the bf16 weights, on text of which no file was trained on.
    model.load_state_dict({name: t.float() for name, t in weights.items()})
    held_out = bits_per_byte(model.eval(), tokenizer, held_out_texts[:400], args.device, args.length)
    parameters = sum(t.numel() for t in weights.values())
    print(f"{parameters / 1e6:.2f} M parameters, held-out bits per byte {held_out:.3f}")

    (args.out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    tokenizer.save(str(args.out / "tokenizer.json"))
    special = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL, strict=False))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    tokenizer_config |= {"chat_template": CHAT_TEMPLATE, "model_max_length": CONFIG["max_position_embeddings"]}
    (args.out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    facts = {"held_out_bits_per_byte": round(held_out, 3), "parameters": parameters, "steps": args.steps}
    facts |= {"batch": args.batch, "length": args.length, "lr": args.lr, "seed": args.seed}
    corpus = hashlib.sha256("\0".join(train_texts).encode()).hexdigest()
    facts |= {"corpus_sha256": corpus, "torch": torch.__version__, "device": args.device}
    if args.device == "cuda":
        facts["device"] = torch.cuda.get_device_name()
    (args.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
