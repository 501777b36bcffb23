# SPDX-License-Identifier: Apache-2.0
"""How trees are shaped, from the environment; SGLang's command line has no flags for an algorithm of a plugin."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class TreeOptions:
    """branching: candidates a position, at most; 1 makes every tree a chain, 0 is no limit. spine: the path of the
    likeliest tokens goes in first. min_prob: the search ends at the first path that the drafter finds less likely."""

    branching: int = 0
    spine: bool = False
    min_prob: float = 0.0

    @property
    def min_log_prob(self) -> float:
        return math.log(self.min_prob) if self.min_prob > 0 else -math.inf

    @classmethod
    def from_environment(cls) -> TreeOptions:
        """KDTREE_BRANCHING, KDTREE_SPINE and KDTREE_MIN_PROB. Raises ValueError that names the variable."""
        branching = _number("KDTREE_BRANCHING", int, "a whole number, 0 for no limit", lambda n: n >= 0)
        spine = _number("KDTREE_SPINE", int, "0 or 1", lambda n: n in (0, 1))
        min_prob = _number("KDTREE_MIN_PROB", float, "a probability below 1", lambda p: 0 <= p < 1)
        return cls(branching, bool(spine), min_prob)


def _number(name: str, kind: type, wanted: str, is_valid) -> int | float:  # noqa: ANN001
    text = os.environ.get(name, "0")
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not is_valid(value):
        raise ValueError(f"{name} must be {wanted}, is {text!r}.")
    return value
