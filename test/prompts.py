# SPDX-License-Identifier: Apache-2.0
"""Real prompts: text of standard-library files that the tiny model was not trained on."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer

from server import TINY_MODEL
from train import BOS, is_held_out


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))


@functools.cache
def held_out_tokens() -> list[list[int]]:
    """Token ids of the held-out files, each after <|bos|>, the longest first."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    paths = [p for p in sorted(stdlib.rglob("*.py")) if "site-packages" not in p.parts]
    chosen = [p for p in paths if is_held_out(p.relative_to(stdlib)) and p.stat().st_size > 6000]
    texts = [p.read_text(encoding="utf-8", errors="ignore") for p in chosen]
    return sorted(([BOS, *tokenizer().encode(text).ids] for text in texts), key=len, reverse=True)


def held_out_prompts(count: int, shortest: int = 8, longest: int = 200) -> list[list[int]]:
    """`count` prompts of lengths spread from `shortest` to `longest` tokens, each from another place."""
    files = held_out_tokens()
    prompts = []
    for i in range(count):
        tokens = files[i % len(files)]
        length = shortest + (longest - shortest) * i // max(count - 1, 1)
        start = (i // len(files)) * longest
        prompts.append(tokens[start : start + length])
    return prompts
