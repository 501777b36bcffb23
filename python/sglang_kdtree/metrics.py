# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the backend and of DDTREE, on upstream's /metrics (--enable-metrics).

Every worker process counts for itself; prometheus_client's multiprocess files bring the counts together. All of them
are counted on the host, from what it knows anyway: nothing waits for a device.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

TOKENS_A_ROUND = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)


def version() -> str:
    """Of this fork, such as 0.5.23+kdtree.1."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@functools.cache
def _families() -> dict[str, Any]:
    """The metrics of this process, made once: prometheus_client refuses a second of the same name. Imported here, as
    it looks for its folder of files when it is imported."""
    from prometheus_client import Counter, Gauge, Histogram

    rank = ("model_name", "tp_rank")
    return {
        "info": Gauge(
            "sglang:kdtree_mla_info",
            "1, with what a rank runs as labels.",
            (*rank, "tp_size", "worker_pid", "device", "kernel", "kv_cache", "mode", "version"),
            multiprocess_mode="mostrecent",
        ),
        "steps": Counter("sglang:kdtree_mla_steps_total", "Forward steps, by forward mode.", (*rank, "forward_mode")),
        "rows": Counter(
            "sglang:kdtree_mla_rows_total", "Query tokens of all steps, by forward mode.", (*rank, "forward_mode")
        ),
        "width": Gauge("sglang:ddtree_width", "Nodes of a tree, root included.", rank, multiprocess_mode="mostrecent"),
        "accepted": Histogram(
            "sglang:ddtree_tokens_per_round", "Tokens that a request gained in a round.", rank, buckets=TOKENS_A_ROUND
        ),
    }


def _model_name(args: Any) -> str:
    return str(getattr(args, "served_model_name", None) or getattr(args, "model_path", ""))


class RankMetrics:
    """What one rank reports. Does nothing unless the server has --enable-metrics."""

    def __init__(self, runner: ModelRunner, tp_rank: int) -> None:
        args = getattr(runner, "server_args", None)
        self._enabled = bool(getattr(args, "enable_metrics", False)) and not runner.is_draft_worker
        self._labels = {"model_name": _model_name(args), "tp_rank": str(tp_rank)}
        self._by_mode: dict[str, tuple[Any, Any]] = {}

    def info(self, tp_size: int, device: str, kernel: str, kv_cache: str, mode: str) -> None:
        if self._enabled:
            facts = {"device": device, "kernel": kernel, "kv_cache": kv_cache, "mode": mode, "version": version()}
            _families()["info"].labels(**self._labels, tp_size=str(tp_size), worker_pid=str(os.getpid()), **facts).set(
                1
            )

    def step(self, forward_mode: str, tokens: int) -> None:
        if not self._enabled:
            return
        if forward_mode not in self._by_mode:
            labels = {**self._labels, "forward_mode": forward_mode}
            self._by_mode[forward_mode] = tuple(_families()[name].labels(**labels) for name in ("steps", "rows"))
        steps, rows = self._by_mode[forward_mode]
        steps.inc()
        rows.inc(tokens)

    def width(self, width: int) -> None:
        if self._enabled:
            _families()["width"].labels(**self._labels).set(width)

    @functools.cached_property
    def _accepted(self) -> Any:
        return _families()["accepted"].labels(**self._labels)

    def round(self, tokens: list[int]) -> None:
        """tokens: that each request of a batch gained."""
        if self._enabled:
            for count in tokens:
                self._accepted.observe(count)
