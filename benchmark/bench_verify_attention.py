# SPDX-License-Identifier: Apache-2.0
"""kdtree_mla_verify beside a plain torch einsum implementation, in one run: microseconds and their ratio.

    python benchmark/bench_verify_attention.py --device cpu [--dtype bfloat16] [--out FILE.json]

Every request has a random tree and a full prefix, its slots lie at random places of the cache. Medians of alternating
repetitions. The einsum implementation does what the op does, from the same arguments: unpacks the mask, gathers the
rows of the slots, scores, masks, softmax in fp32, weighted sum of the first 512 columns, over the whole batch at once.
Before a shape is timed, the two results are compared.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import sgl_kernel  # noqa: F401  (registers torch.ops.sgl_kernel)
import torch

from kdtree_spec.oracle import ancestor_mask, pack_tree_mask

HEADS = (4, 8, 16)
WIDTHS = (1, 8, 16, 32)
PREFIXES = (256, 4096, 32768)
BATCHES = (1, 4)
SCALE = 192**-0.5


class Problem:
    """Inputs of one shape: `batch` requests with `prefix` committed tokens and a random tree of `width` nodes each."""

    def __init__(self, heads: int, width: int, prefix: int, batch: int, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        rng = np.random.default_rng(seed)
        length = prefix + width
        slots = batch * length + 64
        self.batch, self.width = batch, width
        self.q = torch.randn(batch * width, heads, 576, generator=generator).to(dtype)
        self.kv_cache = torch.randn(slots, 1, 576, generator=generator).to(dtype)
        permuted = torch.randperm(slots, generator=generator)[: batch * length]
        self.slot_table = permuted.view(batch, length).int()
        self.table_rows = torch.arange(batch)
        self.prefix_lens = torch.full((batch,), prefix)
        parents = [[-1] + [int(rng.integers(0, i)) for i in range(1, width)] for _ in range(batch)]
        mask = np.concatenate([ancestor_mask(p) for p in parents])
        self.tree_mask = torch.from_numpy(pack_tree_mask(mask))
        self.out = torch.empty(batch * width, heads, 512, dtype=dtype)

    def run_op(self) -> torch.Tensor:
        # fmt: off
        torch.ops.sgl_kernel.kdtree_mla_verify(
            self.q, self.kv_cache, self.slot_table, self.table_rows, 1, self.prefix_lens, self.tree_mask, SCALE, 1.0,
            self.out, None, None)
        # fmt: on
        return self.out

    def run_einsum(self) -> torch.Tensor:
        keys = self.kv_cache[self.slot_table[self.table_rows].long(), 0]
        node = torch.arange(keys.shape[1]) - self.prefix_lens[:, None]  # [batch, keys], below 0 in the prefix
        words = self.tree_mask.view(self.batch, self.width, -1)
        word = (node // 32).clamp(0, words.shape[2] - 1)[:, None].expand(-1, self.width, -1)
        seen = (node < 0)[:, None] | ((words.gather(2, word) >> (node % 32)[:, None]) & 1).bool()
        q = self.q.unflatten(0, (self.batch, self.width))
        scores = torch.einsum("bwhd,bkd->bhwk", q, keys).float() * SCALE
        weights = scores.masked_fill_(~seen[:, None], -math.inf).softmax(-1).to(q.dtype)
        return torch.einsum("bhwk,bkd->bwhd", weights, keys[..., :512]).flatten(0, 1)


def timed_medians(functions: list[Callable[[], torch.Tensor]], budget: float) -> list[float]:
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


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds a shape")
    parser.add_argument("--out", type=Path, default=Path("bench_verify_attention.json"))
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    device = f"{cpu_name()}, {torch.get_num_threads()} threads"
    kernel = torch.ops.sgl_kernel.kdtree_mla_cpu_variant()
    print(f"{device}; torch {torch.__version__}; {args.dtype}; kernel {kernel}")
    print(f"{'heads':>5} {'width':>5} {'prefix':>6} {'batch':>5} {'op us':>10} {'einsum us':>10} {'ratio':>6}")
    rows = []
    for heads in HEADS:
        for width in WIDTHS:
            for prefix in PREFIXES:
                for batch in BATCHES:
                    problem = Problem(heads, width, prefix, batch, dtype)
                    error = (
                        problem.run_op().float() - problem.run_einsum().float()
                    ).norm() / problem.out.float().norm()
                    assert error < 2e-2, f"the two results differ by {error:.1e}"
                    op, einsum = timed_medians([problem.run_op, problem.run_einsum], args.budget)
                    row = {"heads": heads, "width": width, "prefix": prefix, "batch": batch}
                    rows.append(row | {"op_us": op, "einsum_us": einsum, "ratio": einsum / op})
                    shape = f"{heads:5} {width:5} {prefix:6} {batch:5}"
                    print(f"{shape} {op:10.0f} {einsum:10.0f} {einsum / op:6.2f}", flush=True)
    ratios = [row["ratio"] for row in rows]
    mean = math.exp(statistics.mean(map(math.log, ratios)))
    print(f"geometric mean {mean:.2f}, lowest {min(ratios):.2f}")
    facts = {"device": device, "torch": torch.__version__, "dtype": args.dtype, "kernel": kernel}
    args.out.write_text(json.dumps(facts | {"geometric_mean": mean, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
