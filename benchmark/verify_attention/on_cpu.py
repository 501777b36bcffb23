# SPDX-License-Identifier: Apache-2.0
"""On the CPU: the op beside a plain torch einsum implementation.

The einsum implementation does what the op does, from the same arguments: unpacks the mask, gathers the rows of the
slots, scores, masks, softmax in fp32, weighted sum of the first 512 columns, over the whole batch at once.
"""

from __future__ import annotations

import math
import platform
import statistics
from pathlib import Path
from typing import Any

import sgl_kernel  # noqa: F401  (registers torch.ops.sgl_kernel)
import torch

from verify_attention.problem import SCALE, Problem
from verify_attention.timing import cpu_medians

HEADS = (4, 8, 16)
WIDTHS = (1, 8, 16, 32)
PREFIXES = (256, 4096, 32768)
BATCHES = (1, 4)


def run_einsum(p: Problem) -> torch.Tensor:
    keys = p.kv_cache[p.slot_table[p.table_rows].long(), 0]
    node = torch.arange(keys.shape[1]) - p.prefix_lens[:, None]  # [batch, keys], below 0 in the prefix
    words = p.tree_mask.view(p.batch, p.width, -1)
    word = (node // 32).clamp(0, words.shape[2] - 1)[:, None].expand(-1, p.width, -1)
    seen = (node < 0)[:, None] | ((words.gather(2, word) >> (node % 32)[:, None]) & 1).bool()
    q = p.q.unflatten(0, (p.batch, p.width))
    scores = torch.einsum("bwhd,bkd->bhwk", q, keys).float() * SCALE
    weights = scores.masked_fill_(~seen[:, None], -math.inf).softmax(-1).to(q.dtype)
    return torch.einsum("bhwk,bkd->bwhd", weights, keys[..., :512]).flatten(0, 1)


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def run(dtype_name: str, budget: float) -> dict[str, Any]:
    """Print the table; what is written as JSON."""
    dtype = getattr(torch, dtype_name)
    device = f"{cpu_name()}, {torch.get_num_threads()} threads"
    kernel = torch.ops.sgl_kernel.kdtree_mla_cpu_variant()
    print(f"{device}; torch {torch.__version__}; {dtype_name}; kernel {kernel}")
    print(f"{'heads':>5} {'width':>5} {'prefix':>6} {'batch':>5} {'op us':>10} {'einsum us':>10} {'ratio':>6}")
    rows = []
    for heads in HEADS:
        for width in WIDTHS:
            for prefix in PREFIXES:
                for batch in BATCHES:
                    problem = Problem(heads, width, prefix, batch, dtype)
                    out, reference = problem.run_op().float(), run_einsum(problem).float()
                    error = (out - reference).norm() / reference.norm()
                    assert error < 2e-2, f"the two results differ by {error:.1e}"
                    op, einsum = cpu_medians([problem.run_op, lambda p=problem: run_einsum(p)], budget)
                    row = {"heads": heads, "width": width, "prefix": prefix, "batch": batch}
                    rows.append(row | {"op_us": op, "einsum_us": einsum, "ratio": einsum / op})
                    shape = f"{heads:5} {width:5} {prefix:6} {batch:5}"
                    print(f"{shape} {op:10.0f} {einsum:10.0f} {einsum / op:6.2f}", flush=True)
    ratios = [row["ratio"] for row in rows]
    mean = math.exp(statistics.mean(map(math.log, ratios)))
    print(f"geometric mean {mean:.2f}, lowest {min(ratios):.2f}")
    facts = {"device": device, "torch": torch.__version__, "dtype": dtype_name, "kernel": kernel}
    return facts | {"geometric_mean": mean, "rows": rows}
