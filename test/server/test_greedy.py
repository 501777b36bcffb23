# SPDX-License-Identifier: Apache-2.0
"""The server's greedy tokens against an independent forward, without and with speculation, on one and two ranks."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import SMALL, TOKENS, assert_greedy, log_lines, outputs_of
from prompts import held_out_tokens
from reference import ReferenceModel
from server import Server

NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "12")
START_LINE = re.compile(r"kdtree_mla: rank=(\d+)/(\d+) pid=(\d+) device=cpu kernel=\w+ kv_cache=float32 mode=native")


def start_lines(server: Server) -> list[tuple[str, ...]]:
    return [m.groups() for line in log_lines(server.log, "kdtree_mla: rank") if (m := START_LINE.search(line))]


def test_plain_decoding_equals_the_reference(
    plain_outputs: list[list[int]], prompts: list[list[int]], reference: ReferenceModel
) -> None:
    for prompt, output in zip(prompts, plain_outputs, strict=True):
        assert len(output) == TOKENS
        assert_greedy(reference, prompt, output)


def test_chunked_prefill_behind_a_cached_prefix_equals_the_reference(plain: Server, reference: ReferenceModel) -> None:
    long = held_out_tokens()[0][:1700]
    for length in (300, 1000, 1700):  # each begins with the one before: the radix cache holds its prefix
        reply = plain.generate(long[:length], 24, ignore_eos=True)
        assert_greedy(reference, long[:length], reply["output_ids"])
    assert reply["meta_info"]["cached_tokens"] >= 1000


def test_uneven_prefill_batch_equals_the_reference(plain: Server, reference: ReferenceModel) -> None:
    """One batch in which some prompts have a cached prefix and some do not."""
    long = held_out_tokens()[1]
    batch = [long[:700], long[:40], long[:650], held_out_tokens()[2][:90]]
    plain.generate(long[:600], 1)
    for prompt, output in zip(batch, outputs_of(plain, batch, 16, in_flight=4), strict=True):
        assert_greedy(reference, prompt, output)


def test_one_start_line(plain: Server) -> None:
    assert [line[:2] for line in start_lines(plain)] == [("0", "1")]


@pytest.fixture(scope="module")
def ngram(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Trees from NGRAM; started through `sglang serve`, the other way in."""
    launch = (str(Path(sys.executable).parent / "sglang"), "serve")
    log = tmp_path_factory.mktemp("ngram") / "log"
    with Server(log, *SMALL, *NGRAM, "--max-running-requests", "40", python="/usr/bin/env", launch=launch) as server:
        yield server


def test_ngram_trees_give_the_same_tokens(
    ngram: Server, prompts: list[list[int]], plain_outputs: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = tokens = 0
    for prompt, plain_output in zip(prompts, plain_outputs, strict=True):
        reply = ngram.generate(prompt, TOKENS, ignore_eos=True)
        assert reply["output_ids"] == plain_output
        rounds += reply["meta_info"]["spec_verify_ct"]
        tokens += reply["meta_info"]["completion_tokens"]
    with capsys.disabled():
        print(f"\nNGRAM, 12 draft tokens: accept length {tokens / rounds:.2f} over {len(prompts)} prompts")
    assert tokens / rounds > 1.5


def test_ngram_trees_in_a_batch_give_the_same_tokens(
    ngram: Server, prompts: list[list[int]], plain_outputs: list[list[int]]
) -> None:
    assert outputs_of(ngram, prompts, in_flight=8) == plain_outputs


def test_two_ranks_give_the_same_tokens_and_one_dead_rank_ends_the_server(
    tmp_path: Path, prompts: list[list[int]], plain_outputs: list[list[int]]
) -> None:
    with Server(tmp_path / "log", *SMALL, *NGRAM, "--max-running-requests", "40", tp=2) as server:
        lines = start_lines(server)
        assert sorted(line[:2] for line in lines) == [("0", "2"), ("1", "2")]
        assert outputs_of(server, prompts[:20], in_flight=4) == plain_outputs[:20]
        os.kill(int(dict((rank, pid) for rank, _, pid in lines)["1"]), signal.SIGKILL)
        assert server.wait_exit(timeout=60) != 0
