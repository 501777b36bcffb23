# SPDX-License-Identifier: Apache-2.0
"""Medians of functions that are timed in turn, so that a drift of the machine meets all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def cpu_medians(functions: list[Callable[[], Any]], budget: float) -> list[float]:
    """Median microseconds of each, called in turn, until `budget` seconds or 200 rounds are spent (at least 5)."""
    for function in functions:
        function()
    samples: list[list[float]] = [[] for _ in functions]
    end = time.perf_counter() + budget
    while len(samples[0]) < 5 or (time.perf_counter() < end and len(samples[0]) < 200):
        for function, taken in zip(functions, samples, strict=True):
            started = time.perf_counter()
            function()
            taken.append((time.perf_counter() - started) * 1e6)
    return [statistics.median(taken) for taken in samples]


def captured(function: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """The function as a CUDA graph; it runs twice before, for what it sets up at first."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function()
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        function()
    return graph


def cuda_medians(graphs: dict[str, torch.cuda.CUDAGraph], budget: float, flush: torch.Tensor) -> dict[str, float]:
    """Median microseconds of a replay of each, in turn, from device events, until `budget` seconds or 50 rounds are
    spent, at least 7. Before each, `flush` is read, which should be larger than the L2 cache: a read, as what a write
    leaves there would have to be written back meanwhile."""
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    taken_cache = flush.new_empty(())
    started = time.perf_counter()
    for round_ in range(50):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.amax(flush, 0, out=taken_cache)
            begin.record()
            graph.replay()
            end.record()
            events[name].append((begin, end))
        if round_ >= 6 and round_ % 4 == 3:
            torch.cuda.synchronize()
            if time.perf_counter() - started > budget:
                break
    torch.cuda.synchronize()
    return {
        name: statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in taken) for name, taken in events.items()
    }
