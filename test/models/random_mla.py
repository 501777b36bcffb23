# SPDX-License-Identifier: Apache-2.0
"""A DeepSeek-V3-shaped model with random weights, wider than the tiny one: 16 heads, hidden size 2,048.

    python test/models/random_mla.py --out DIR

It predicts nothing; it is for speed and for arithmetic at a real width. Seeded. The tokenizer is the tiny model's, so
that a server starts; prompts are token ids.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from reference import ReferenceModel
from train import CONFIG, initialise

TINY = Path(__file__).with_name("tiny-mla")
WIDE = CONFIG | {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 1536,
}


def write(folder: Path, seed: int = 0) -> None:
    torch.manual_seed(seed)
    model = ReferenceModel(WIDE)
    initialise(model)
    weights = {name: t.detach().to(torch.bfloat16).contiguous() for name, t in model.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(WIDE, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a DeepSeek-V3-shaped model with random weights.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    write(parser.parse_args().out)
