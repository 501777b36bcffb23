# SPDX-License-Identifier: Apache-2.0
"""On a GPU: the op beside upstream's Triton kernels, FlashInfer fa2 and fa3, and FlashMLA, with the floor.

Everything is timed as replays of a CUDA graph, in turn, behind a read that takes the L2 cache. The floor is the larger
of the bytes that must be read and written over the measured read bandwidth, and the operations over the measured
bf16 rate of mma.sync.
"""

from __future__ import annotations

import math
import statistics
import traceback
from collections.abc import Callable
from typing import Any

import torch

from sglang_kdtree import plugin
from verify_attention import ceilings, competitors
from verify_attention.problem import Problem
from verify_attention.timing import captured, cuda_medians

BATCH_PREFIX = [(b, n) for b in (1, 4) for n in (1024, 4096, 16384, 65536)] + [(16, n) for n in (1024, 4096, 16384)]
TREES = [(8, 8), (8, 16), (8, 32), (16, 16), (16, 64), (64, 16)]  # heads, draft tokens
DECODES = [(8, 1), (16, 1), (64, 1)]
DECODE_SPLITS = (8, 32, 128)

# The sm_120 model: what NVIDIA publishes for the RTX PRO 6000 Blackwell, none of it measured here.
SM120 = {"sms": 188, "clock_hz": 2.617e9, "memory_bytes_s": 1.792e12, "flop_clk_sm": 1024, "shared_bytes_clk_sm": 128}


def floor(p: Problem, peak: dict[str, float]) -> tuple[float, str]:
    """Microseconds, and which of the two binds."""
    keys = p.batch * (p.prefix + p.width)
    rows = p.width * p.heads
    moved = keys * 1152 + p.batch * rows * (576 + 512) * 2
    memory = moved / peak["read_bytes"] * 1e6
    arithmetic = keys * rows * 2 * (576 + 512) / peak["mma_bf16_flops"] * 1e6
    return (memory, "memory") if memory >= arithmetic else (arithmetic, "mma")


def model_sm120(heads: int, width: int) -> dict[str, Any]:
    """Clocks that a tile of 16 keys, for all rows of a request, takes of each resource of an SM of sm_120 if the
    resources overlap, and the fraction of the floor that the largest leaves."""
    # fmt: off
    rows, row_blocks, _, _, _, shared, traffic = torch.ops.sgl_kernel.kdtree_mla_plan(
        heads, width, SM120["sms"], SM120["sms"])
    # fmt: on
    clocks = {
        "memory": 16 * 1152 / (SM120["memory_bytes_s"] / SM120["sms"] / SM120["clock_hz"]),
        "mma": row_blocks * rows * 16 * 2 * (576 + 512) / SM120["flop_clk_sm"],
        "shared memory": row_blocks * traffic / SM120["shared_bytes_clk_sm"],
    }
    useful = max(clocks["memory"], clocks["mma"] * heads * width / (row_blocks * rows))
    binds = max(clocks, key=clocks.__getitem__)
    return {
        "rows_a_block": rows,
        "shared_bytes": shared,
        "shared_traffic_a_tile": traffic,
        "clocks_a_tile": clocks,
        "binds": binds,
        "fraction_of_floor": useful / clocks[binds],
    }


class Field:
    """Everyone who takes part, until something of theirs fails; then they are out, with the reason."""

    def __init__(self, only: list[str] | None) -> None:
        self.tree: dict[str, Callable] = {"triton": competitors.triton_tree}
        self.decode: dict[str, Callable] = {f"triton/{s}": competitors.triton_decode(s) for s in DECODE_SPLITS}
        self.paged: dict[str, Callable] = {
            "fa2": competitors.flashinfer("fa2"),
            "fa3": competitors.flashinfer("fa3"),
            "flashmla": competitors.flashmla,
        }
        self.out: dict[str, str] = {}
        if only is not None:
            for group in (self.tree, self.decode, self.paged):
                for name in [n for n in group if n.split("/")[0] not in only]:
                    del group[name]

    def graph(self, name: str, prepare: Callable[[], competitors.Run], want: torch.Tensor) -> Any:
        """Its captured graph, or None; the result is compared with the op's."""
        if name in self.out:
            return None
        try:
            run = prepare()
            difference(name, run(), want)
            return captured(run)
        except Exception as error:
            torch.cuda.synchronize()
            self.out[name] = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
            print(f"{name} does not take part: {self.out[name]}")
            if not isinstance(error, ImportError):
                traceback.print_exc()
            return None


def difference(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    error = float((got.float() - want.float()).norm() / want.float().norm())
    if not error < 1e-2:
        raise ValueError(f"the results of {name} and of the op differ by {error:.1e}")


def measure(field: Field, p: Problem, peak: dict[str, float], budget: float, flush: torch.Tensor) -> dict[str, Any]:
    tree = p.width > 1
    want = p.run_op().clone()
    graphs = {"ours": captured(p.run_op)}
    for name, prepare in (field.tree if tree else field.decode).items():
        graphs[name] = field.graph(name, lambda prepare=prepare: prepare(p), want)
    paged = competitors.Paged(p)
    want = paged.run_op().clone()
    for name, prepare in field.paged.items():
        graphs[name] = field.graph(name, lambda prepare=prepare: prepare(paged), want)
    us = cuda_medians({name: graph for name, graph in graphs.items() if graph is not None}, budget, flush)
    if not tree:
        splits = {name: us.pop(name) for name in list(us) if name.startswith("triton/")}
        if splits:
            us["triton"] = min(splits.values())
    floor_us, bound = floor(p, peak)
    return {
        "heads": p.heads,
        "width": p.width,
        "batch": p.batch,
        "prefix": p.prefix,
        "us": us,
        "floor_us": floor_us,
        "floor_bound": bound,
        "fraction_of_floor": floor_us / us["ours"],
        "model_sm120": model_sm120(p.heads, p.width),
    }


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.mean(map(math.log, values)))


def ratios(rows: list[dict[str, Any]], name: str) -> list[float]:
    return [row["us"][name] / row["us"]["ours"] for row in rows if name in row["us"]]


def summary(rows: list[dict[str, Any]], title: str) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name in ("triton", "fa2", "fa3", "flashmla"):
        values = ratios(rows, name)
        if values:
            facts[name] = {"geometric_mean": geometric_mean(values), "lowest": min(values), "highest": max(values)}
            print(
                f"{title}: {name} / ours: geometric mean {geometric_mean(values):.2f}, lowest {min(values):.2f}, "
                f"highest {max(values):.1f}"
            )
    long = [row["fraction_of_floor"] for row in rows if row["floor_us"] > 50]
    short = [row["us"]["ours"] for row in rows if row["floor_us"] < 2]
    if long:
        facts["lowest_fraction_over_50us"] = min(long)
        print(f"{title}: where the floor is over 50 us: {min(long):.0%} to {max(long):.0%} of it")
    if short:
        facts["highest_us_under_2us"] = max(short)
        print(f"{title}: where the floor is under 2 us: at most {max(short):.1f} us")
    return facts


def run(dtype_name: str, budget: float, only: list[str] | None) -> dict[str, Any]:
    """Print the table; what is written as JSON."""
    if not torch.cuda.is_available():
        raise SystemExit("--device cuda needs a CUDA GPU; none is here. Use --device cpu.")
    plugin.load_kernels()
    dtype = getattr(torch, dtype_name)
    device = torch.cuda.get_device_name()
    kernel = torch.ops.sgl_kernel.kdtree_mla_cuda_variant(torch.cuda.current_device())
    peak = ceilings.measure()
    print(f"{device}; torch {torch.__version__}; {dtype_name}; kernel {kernel}")
    print(f"mma.sync {peak['mma_bf16_flops'] / 1e12:.0f} TFLOP/s, read {peak['read_bytes'] / 1e12:.2f} TB/s")
    kv_cache = torch.randn(16 * (16384 + 64) + 4096, 1, 576, device="cuda").to(dtype)
    flush = torch.ones(256 << 20, dtype=torch.uint8, device="cuda")
    field = Field(only)
    names = ["ours", "triton", "fa2", "fa3", "flashmla"]
    header = f"{'heads':>5} {'width':>5} {'batch':>5} {'prefix':>6} {'floor':>7} {'of it':>5}"
    print(header + "".join(f"{name:>9}" for name in names) + "   triton/ fa2/  sm_120 model")
    rows = []
    for heads, width in TREES + DECODES:
        for batch, prefix in BATCH_PREFIX:
            problem = Problem(heads, width, prefix, batch, dtype, "cuda", kv_cache)
            row = measure(field, problem, peak, budget, flush)
            rows.append(row)
            us = row["us"]
            cells = "".join(f"{us[name]:9.1f}" if name in us else f"{'-':>9}" for name in names)
            over = [us[name] / us["ours"] if name in us else math.nan for name in ("triton", "fa2")]
            model = row["model_sm120"]
            print(
                f"{heads:5} {width:5} {batch:5} {prefix:6} {row['floor_us']:7.1f} {row['fraction_of_floor']:5.0%}"
                f"{cells} {over[0]:8.1f} {over[1]:5.2f}  {model['binds']} {model['fraction_of_floor']:.0%}",
                flush=True,
            )
    print("sm_120 model, from NVIDIA's figures for the RTX PRO 6000 Blackwell; nothing of it is measured:")
    for tile in {row["model_sm120"]["rows_a_block"]: row["model_sm120"] for row in rows}.values():
        print(
            f"  a block of {tile['rows_a_block']} rows: {tile['shared_bytes']} B of shared memory, "
            f"{tile['shared_traffic_a_tile']} B through it a tile of 16 keys"
        )
    facts = {"device": device, "torch": torch.__version__, "dtype": dtype_name, "kernel": kernel, "ceilings": peak}
    facts["trees"] = summary([row for row in rows if row["width"] > 1], "trees")
    facts["decode"] = summary([row for row in rows if row["width"] == 1], "decode")
    return facts | {"sm120_figures": SM120, "not_taking_part": field.out, "rows": rows}
