# SPDX-License-Identifier: Apache-2.0
"""kdtree_mla_verify beside other implementations, in one run: microseconds and their ratios.

    python benchmark/bench_verify_attention.py --device cpu|cuda [--dtype bfloat16] [--out FILE.json]

On the CPU: beside a plain torch einsum implementation. On a GPU: beside upstream's Triton kernels, FlashInfer and
FlashMLA, with the floor that the GPU's measured ceilings set. Every request has a random tree and a full prefix, its
slots lie at random places of the cache. Medians of alternating repetitions. Before a shape is timed, the results are
compared.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--budget", type=float, help="seconds a shape (1 on the CPU, 0.15 on a GPU)")
    parser.add_argument("--only", metavar="NAMES", help="on a GPU: these beside the op, such as triton,fa2")
    parser.add_argument("--out", type=Path, default=Path("bench_verify_attention.json"))
    args = parser.parse_args()
    if args.device == "cpu":
        from verify_attention import on_cpu

        result = on_cpu.run(args.dtype, args.budget or 1.0)
    else:
        if args.dtype == "float32":
            parser.error("--dtype float32 is for the CPU; a GPU takes bfloat16 or float16")
        from verify_attention import on_cuda

        only = None if args.only is None else args.only.split(",")
        result = on_cuda.run(args.dtype, args.budget or 0.15, only)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
