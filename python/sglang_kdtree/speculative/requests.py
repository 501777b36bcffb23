# SPDX-License-Identifier: Apache-2.0
"""Requests that a tree cannot serve. Each ends with HTTP 400 and a message; the others of its batch go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_batch import FINISH_ABORT

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

# A penalty depends on the tokens before a node, of which each node of a tree has others.
PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}


def refusal(req: Req) -> str | None:
    """Why DDTREE does not serve the request, or None."""
    for name, neutral in PENALTIES.items():
        if getattr(req.sampling_params, name) != neutral:
            return f"DDTREE does not serve {name}; leave it at {neutral}, or use another --speculative-algorithm."
    if getattr(req, "return_sampling_mask", False):
        return "DDTREE does not serve return_sampling_mask."
    if req.return_hidden_states:
        return "DDTREE does not serve return_hidden_states."
    return None


def refuse_unserved(reqs: list[Req]) -> None:
    """Mark what cannot be served; the scheduler ends such a request when this step's results come in."""
    for req in reqs:
        message = refusal(req)
        if message is not None and not req.finished():
            req.to_finish = FINISH_ABORT(message, 400, "BadRequestError")
