# SPDX-License-Identifier: Apache-2.0
"""From a drafter's logits to trees: the device ops beside a heap in Python with its copies, in one run.

    python benchmark/bench_tree_ops.py --device cpu|cuda [--out FILE.json]

Microseconds, medians of alternating repetitions. `ops`: kdtree_top_k and kdtree_build_tree; on a GPU a replayed CUDA
graph, timed by device events with a cold L2 cache. `heap`: torch.topk, torch.logsumexp, the copies to the host, and the
plain heap of kdtree_spec, timed from outside, as it keeps the host busy. The op's trees are compared with the heap's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kdtree_spec.tree import build_tree
from verify_attention.timing import captured, cpu_medians, cuda_medians

POSITIONS, WIDTH = 15, 32  # a budget of 31 nodes and the root


class Drafts:
    """The logits of a batch's blocks, and what becomes of them."""

    def __init__(self, batch: int, vocabulary: int, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batch, self.k = batch, WIDTH - 1
        self.logits = (torch.randn(batch * POSITIONS, vocabulary, generator=generator) * 3).to(device, dtype)
        self.roots = torch.arange(batch, device=device)
        shape = (batch * POSITIONS, self.k)
        self.log_probs = torch.empty(shape, device=device)
        self.ids = torch.empty(shape, dtype=torch.int64, device=device)
        self.normalisers = torch.empty(shape[0], device=device)
        per_node = [torch.empty(batch, WIDTH, dtype=t, device=device) for t in (torch.int64, torch.int32, torch.int32)]
        mask = torch.empty(batch * WIDTH, 1, dtype=torch.int32, device=device)
        links = [torch.empty(batch, WIDTH, dtype=torch.int64, device=device) for _ in range(2)]
        self.tree = (*per_node, mask, *links, torch.empty(batch, dtype=torch.int32, device=device))

    def best(self) -> None:
        torch.ops.sgl_kernel.kdtree_top_k(self.logits, 0, self.log_probs, self.ids, self.normalisers)

    def build(self) -> None:
        shape = (self.batch, POSITIONS, self.k)
        torch.ops.sgl_kernel.kdtree_build_tree(
            self.log_probs.view(shape), self.ids.view(shape), self.roots, False, -float("inf"), *self.tree
        )

    def ops(self) -> None:
        self.best()
        self.build()

    def heap(self) -> list[list[int]]:
        logits = self.logits.float()
        values, ids = torch.topk(logits, self.k)
        log_probs = values - torch.logsumexp(logits, -1, keepdim=True)
        return self.heap_on(log_probs.cpu().numpy(), ids.cpu().numpy())

    def heap_on(self, log_probs: np.ndarray, ids: np.ndarray) -> list[list[int]]:
        shape = (self.batch, POSITIONS, self.k)
        log_probs, ids = log_probs.reshape(shape), ids.reshape(shape)
        return [build_tree(log_probs[b], ids[b], int(root), WIDTH).tokens for b, root in enumerate(self.roots.tolist())]


def outside(function: Any, repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        function()
        taken.append((time.perf_counter() - started) * 1e6)
    return statistics.median(taken)


def measure(batch: int, vocabulary: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    drafts = Drafts(batch, vocabulary, dtype, device)
    drafts.ops()
    best = drafts.log_probs.cpu().numpy(), drafts.ids.cpu().numpy()
    assert drafts.tree[0].tolist() == drafts.heap_on(*best), "the tree is not the heap's"
    row: dict[str, Any] = {"batch": batch, "vocabulary": vocabulary, "logits": str(dtype).removeprefix("torch.")}
    if device == "cpu":
        row["top_k"], row["build"], row["heap"] = cpu_medians([drafts.best, drafts.build, drafts.heap], 2.0)
        row["ops"] = row["top_k"] + row["build"]
    else:
        graphs = {"ops": captured(drafts.ops), "top_k": captured(drafts.best), "build": captured(drafts.build)}
        flush = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
        row |= cuda_medians(graphs, 0.3, flush)
        row["heap"] = outside(drafts.heap, 20)
    row["ratio"] = row["heap"] / row["ops"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--vocabulary", type=int, default=163_840)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--out", type=Path, default=Path("bench_tree_ops.json"))
    args = parser.parse_args()
    from sglang_kdtree import plugin

    plugin.load_kernels()
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{device}; torch {torch.__version__}; {POSITIONS} positions, {WIDTH - 1} nodes and the root; microseconds")
    print(f"{'batch':>5} {'logits':>9} {'top_k':>8} {'build':>8} {'ops':>8} {'heap':>9} {'heap/ops':>8}")
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for batch in args.batches:
            row = measure(batch, args.vocabulary, dtype, args.device)
            rows.append(row)
            print(
                f"{batch:5} {row['logits']:>9} {row['top_k']:8.1f} {row['build']:8.1f} {row['ops']:8.1f} "
                f"{row['heap']:9.0f} {row['ratio']:8.1f}",
                flush=True,
            )
    facts = {"device": device, "torch": torch.__version__, "positions": POSITIONS, "width": WIDTH}
    args.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
