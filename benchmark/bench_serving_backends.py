# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of the server with --attention-backend triton and kdtree_mla, side by side in one run.

    python benchmark/bench_serving_backends.py [--model tiny|wide|DIR] [--out FILE.json]

Four servers share the GPU: both backends, plain and with NGRAM trees. They are asked in turn, with the same prompts.
A shape's prompts are prefilled first, into the prefix cache; what is timed is decoding `--tokens` tokens, of all
requests of the batch at once, from outside. Every repetition has new prompts, so that NGRAM has not seen the answer.
`tiny` is the tests' model (4 heads, 6.9 M parameters) on text that it was not trained on; `wide` has 16 heads, hidden
size 2,048, random weights and random prompts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import Any

import torch

TEST = Path(__file__).resolve().parents[1] / "test"
sys.path[:0] = [str(TEST), str(TEST / "models")]

from prompts import held_out_tokens  # noqa: E402
from server import TINY_MODEL, Server, running  # noqa: E402

BACKENDS = ("triton", "kdtree_mla")


def servers(folder: Path, model: Path, width: int, pool: int, batch: int) -> dict[tuple[str, str], Server]:
    # fmt: off
    common = ("--max-total-tokens", str(pool), "--max-running-requests", str(batch), "--mem-fraction-static", "0.7",
              "--cuda-graph-max-bs", str(batch))
    # fmt: on
    ngram = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(width))
    made = {}
    for backend in BACKENDS:
        for speculation, flags in (("plain", ()), ("NGRAM", ngram)):
            log = folder / f"{backend}-{speculation}.log"
            flag = ("--attention-backend", backend)
            made[speculation, backend] = Server(
                log, *common, *flags, model=model, dtype="bfloat16", backend=flag, device="cuda"
            )
    return made


class Prompts:
    """Prompts that no other repetition has."""

    def __init__(self, model: str) -> None:
        self.rng = random.Random(0)
        self.text = None if model == "wide" else list(chain.from_iterable(held_out_tokens()))

    def batch(self, count: int, length: int) -> list[list[int]]:
        if self.text is None:
            return [[self.rng.randrange(6, 32000) for _ in range(length)] for _ in range(count)]
        starts = [self.rng.randrange(len(self.text) - length) for _ in range(count)]
        return [self.text[start : start + length] for start in starts]


def rate(server: Server, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
    """Tokens a second, and tokens a verify round (1 without speculation)."""
    server.generate_batch(prompts, 1)
    started = time.perf_counter()
    replies = [reply["meta_info"] for reply in server.generate_batch(prompts, tokens)]
    seconds = time.perf_counter() - started
    made = sum(reply["completion_tokens"] for reply in replies)
    rounds = sum(reply.get("spec_verify_ct") or reply["completion_tokens"] for reply in replies)
    return made / seconds, made / rounds


def measure(made: dict[tuple[str, str], Server], prompts: Prompts, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for context in args.contexts:
        for batch in args.batches:
            rates: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in made}
            for _ in range(args.repeats):
                asked = prompts.batch(batch, context)
                for key, server in made.items():
                    rates[key].append(rate(server, asked, args.tokens))
            for speculation in ("plain", "NGRAM"):
                row: dict[str, Any] = {"context": context, "batch": batch, "speculation": speculation}
                for backend in BACKENDS:
                    taken = rates[speculation, backend]
                    row[backend] = statistics.median(r for r, _ in taken)
                    row[f"{backend}_tokens_a_round"] = statistics.mean(t for _, t in taken)
                row["ratio"] = row["kdtree_mla"] / row["triton"]
                rows.append(row)
                print(
                    f"{context:7} {batch:5} {speculation:>11} {row['triton']:10.0f} {row['kdtree_mla']:10.0f} "
                    f"{row['ratio']:6.2f} {row['triton_tokens_a_round']:9.2f} {row['kdtree_mla_tokens_a_round']:9.2f}",
                    flush=True,
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="tiny, wide, or a folder")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--width", type=int, default=16, help="draft tokens of NGRAM's trees")
    parser.add_argument("--tokens", type=int, default=128, help="decoded a request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("bench_serving_backends.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_serving_backends needs a CUDA GPU; none is here.")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = {"tiny": TINY_MODEL, "wide": folder / "wide"}.get(args.model, Path(args.model))
        if args.model == "wide":
            import random_mla

            random_mla.write(model)
        longest = max(args.contexts) + args.tokens + 64
        pool = max(args.batches) * longest * 2
        with running(servers(folder, model, args.width, pool, max(args.batches)), timeout=400) as made:
            device = torch.cuda.get_device_name()
            print(f"{device}; torch {torch.__version__}; model {args.model}; NGRAM trees of {args.width} nodes")
            print(
                f"{'context':>7} {'batch':>5} {'speculation':>11} {'triton':>10} {'kdtree_mla':>10} {'ratio':>6} "
                "  tokens a round of both"
            )
            rows = measure(made, Prompts(args.model), args)
    facts = {"device": device, "torch": torch.__version__, "model": args.model, "width": args.width}
    args.out.write_text(json.dumps(facts | {"tokens": args.tokens, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
