# SPDX-License-Identifier: Apache-2.0
"""A plug-in of the tests: near-ties everywhere, and a rank that sees them otherwise than rank 0.

Target logits are rounded to a coarse grid, so that many are equal. With PERTURB=1, on every rank but 0, each is then
moved by one unit in the last place, up or down at random, and so are the drafter's hidden states.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

GRID = 0.5


def moved(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    up = torch.rand(values.shape, generator=generator) < 0.5
    return torch.where(up, values.nextafter(values + 1), values.nextafter(values - 1))


def register() -> None:
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.models.dflash import DFlashDraftModel
    from sglang.srt.runtime_context import get_parallel

    generator = torch.Generator().manual_seed(0)

    def perturbed() -> bool:
        return os.environ.get("PERTURB") == "1" and get_parallel().tp_rank > 0

    def wrap(owner: type, name: str, change: Any) -> None:
        inner = getattr(owner, name)

        def outer(self: Any, *args: Any, **kwargs: Any) -> Any:
            return change(inner(self, *args, **kwargs))

        setattr(owner, name, outer)

    def change_logits(output: Any) -> Any:
        logits = (output.next_token_logits / GRID).round() * GRID
        if perturbed():
            logits = moved(logits, generator)
        return dataclasses.replace(output, next_token_logits=logits)

    def change_hidden(output: Any) -> Any:
        hidden = output.hidden_states
        return dataclasses.replace(output, hidden_states=moved(hidden, generator) if perturbed() else hidden)

    wrap(LogitsProcessor, "forward", change_logits)
    wrap(DFlashDraftModel, "forward", change_hidden)
