# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of the server: plain decoding, DFLASH's chain and DDTREE's trees, side by side in one run.

    python benchmark/bench_speculative.py [--device cuda|cpu] [--out FILE.json]

One server each, all on the same device: plain decoding and DFLASH with --attention-backend triton, DFLASH and DDTREE of
several widths with kdtree_mla; on the CPU, where upstream has neither Triton nor DFLASH, plain decoding and DDTREE with
kdtree_mla, the chain being DDTREE with branching switched off. They are asked in turn, with the same prompts: text that
neither the tiny model nor its drafter was trained on. Prompts are prefilled first, into the prefix cache; what is timed
is decoding `--tokens` tokens, of all requests of the batch at once, from outside. The milliseconds of a round's stages
are DDTREE's own (KDTREE_STAGE_TIMES), the build of the trees being part of draft, with which it shares a CUDA graph;
benchmark/bench_tree_ops.py times it alone.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench_serving_backends import Prompts, rate

from server import TINY_DRAFTER, TINY_MODEL, Server, running

STAGES = re.compile(
    r"DDTREE ms a round, batch (\d+), \d+ rounds: draft ([\d.]+), verify ([\d.]+), accept ([\d.]+), commit ([\d.]+)"
)
ROUNDS = 8


def servers(folder: Path, args: argparse.Namespace, pool: int) -> dict[str, Server]:
    cuda = args.device == "cuda"
    common = ["--max-total-tokens", str(pool), "--max-running-requests", str(max(args.batches))]
    common += ["--cuda-graph-max-bs", str(max(args.batches)), "--mem-fraction-static", "0.7"] if cuda else []
    drafter = ["--speculative-draft-model-path", str(TINY_DRAFTER)]
    made: dict[str, Server] = {}

    def add(name: str, backend: str, *flags: str, env: dict[str, str] | None = None) -> None:
        made[name] = Server(
            folder / f"{len(made)}.log",
            *common,
            *flags,
            model=TINY_MODEL,
            dtype="bfloat16" if cuda else "float32",
            backend=("--attention-backend", backend),
            device=args.device,
            env={"KDTREE_STAGE_TIMES": str(ROUNDS)} | (env or {}),
        )

    add("plain, triton" if cuda else "plain, kdtree_mla", "triton" if cuda else "kdtree_mla")
    ddtree = ("--speculative-algorithm", "DDTREE", *drafter, "--speculative-num-draft-tokens")
    if cuda:
        dflash = ("--speculative-algorithm", "DFLASH", *drafter, "--speculative-draft-attention-backend", "triton")
        for backend in ("triton", "kdtree_mla"):
            add(f"DFLASH, {backend}", backend, *dflash)
    else:
        add("chain, kdtree_mla", "kdtree_mla", *ddtree, "16", env={"KDTREE_BRANCHING": "1"})
    for width in args.widths:
        add(f"DDTREE {width}, kdtree_mla", "kdtree_mla", *ddtree, str(width))
    return made


def stages(log: str, batch: int) -> dict[str, float] | None:
    """Mean milliseconds of a round's stages in what was logged for a batch size."""
    found = [[float(x) for x in m.groups()[1:]] for m in STAGES.finditer(log) if int(m[1]) == batch]
    if not found:
        return None
    means = [statistics.mean(column) for column in zip(*found, strict=True)]
    return dict(zip(("draft", "verify", "accept", "commit"), means, strict=True))


def measure(made: dict[str, Server], args: argparse.Namespace) -> list[dict[str, Any]]:
    rows, prompts, baseline = [], Prompts("tiny"), next(iter(made))
    print(f"{'context':>7} {'batch':>5}  {'':24} {'tokens/s':>8} {'ratio':>6} {'tokens a round':>14}   ms a round")
    for context in args.contexts:
        for batch in args.batches:
            taken: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
            read = {name: len(server.log_text()) for name, server in made.items()}
            for _ in range(args.repeats):
                asked = prompts.batch(batch, context)
                for name, server in made.items():
                    taken[name].append(rate(server, asked, args.tokens))
            plain = statistics.median(r for r, _ in taken[baseline])
            for name, server in made.items():
                row: dict[str, Any] = {"context": context, "batch": batch, "server": name}
                row["tokens_per_second"] = statistics.median(r for r, _ in taken[name])
                row["ratio"] = row["tokens_per_second"] / plain
                row["tokens_a_round"] = statistics.mean(t for _, t in taken[name])
                row["ms"] = stages(server.log_text()[read[name] :], batch)
                rows.append(row)
                parts = "" if row["ms"] is None else ", ".join(f"{k} {v:.2f}" for k, v in row["ms"].items())
                print(
                    f"{context:7} {batch:5}  {name:24} {row['tokens_per_second']:8.0f} {row['ratio']:6.2f} "
                    f"{row['tokens_a_round']:14.2f}   {parts}",
                    flush=True,
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--widths", type=int, nargs="+", default=[8, 16, 24, 32], help="DDTREE's nodes, root included")
    parser.add_argument("--tokens", type=int, default=128, help="decoded a request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("bench_speculative.json"))
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("bench_speculative --device cuda needs a CUDA GPU; none is here.")
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    pool = max(args.batches) * (max(args.contexts) + args.tokens + 128) * 2
    with tempfile.TemporaryDirectory() as scratch, running(servers(Path(scratch), args, pool), timeout=400) as made:
        print(f"{device}; torch {torch.__version__}; the tiny model and its drafter")
        rows = measure(made, args)
    facts = {"device": device, "torch": torch.__version__, "tokens": args.tokens}
    args.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
