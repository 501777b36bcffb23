# SPDX-License-Identifier: Apache-2.0
"""What a round's time goes into, logged every so many rounds; off by default."""

from __future__ import annotations

import itertools
import logging
import os
import time

import torch

logger = logging.getLogger(__name__)

STAGES = ("draft", "verify", "accept", "commit")


class StageTimes:
    """Mean milliseconds of each stage over KDTREE_STAGE_TIMES rounds of one batch size; 0, the default, measures
    nothing. On a GPU the stages are bounded by events, which are read once all of them have passed: nobody waits."""

    def __init__(self, device: torch.device | str) -> None:
        text = os.environ.get("KDTREE_STAGE_TIMES", "0")
        if not text.isdigit():
            raise ValueError(f"KDTREE_STAGE_TIMES must be a number of rounds, 0 for none, is {text!r}.")
        self._rounds, self._on_cuda = int(text), torch.device(device).type == "cuda"
        self._marks: list[list[torch.cuda.Event | float]] = []
        self._batch = 0

    def _now(self) -> torch.cuda.Event | float:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self, batch: int) -> None:
        if not self._rounds:
            return
        if batch != self._batch:
            self._marks, self._batch = [], batch
        self._report()
        self._marks.append([self._now()])

    def end_stage(self) -> None:
        """The end of the next of STAGES."""
        if self._rounds:
            self._marks[-1].append(self._now())

    def _report(self) -> None:
        if len(self._marks) < self._rounds or (self._on_cuda and not self._marks[-1][-1].query()):
            return
        totals = [0.0] * len(STAGES)
        for marks in self._marks:
            for i, (begin, end) in enumerate(itertools.pairwise(marks)):
                totals[i] += begin.elapsed_time(end) if self._on_cuda else (end - begin) * 1e3
        parts = ", ".join(f"{s} {t / len(self._marks):.3f}" for s, t in zip(STAGES, totals, strict=True))
        logger.info("kdtree_mla: DDTREE ms a round, batch %d, %d rounds: %s", self._batch, len(self._marks), parts)
        self._marks = []
