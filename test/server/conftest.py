# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from prompts import held_out_prompts
from reference import ReferenceModel
from server import TINY_MODEL, Server, request

# Small, so that long prompts come in chunks and requests share the pool.
SMALL = ("--max-total-tokens", "24000", "--context-length", "2048", "--chunked-prefill-size", "256")
TOKENS = 64  # generated after each of the 50 prompts


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    return held_out_prompts(50)


@pytest.fixture(scope="session")
def reference() -> ReferenceModel:
    torch.set_num_threads(1)  # the servers have the other cores
    return ReferenceModel.load(TINY_MODEL)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server without speculation, in fp32."""
    log = tmp_path_factory.mktemp("plain") / "log"
    with Server(log, *SMALL, "--max-running-requests", "40", "--enable-metrics") as server:
        yield server


@pytest.fixture(scope="session")
def plain_outputs(plain: Server, prompts: list[list[int]]) -> list[list[int]]:
    return outputs_of(plain, prompts)


def outputs_of(server: Server, prompts: list[list[int]], tokens: int = TOKENS, in_flight: int = 4) -> list[list[int]]:
    """Greedy output tokens after each prompt, `in_flight` requests at a time."""
    with ThreadPoolExecutor(in_flight) as pool:
        replies = pool.map(lambda p: server.generate(p, tokens, ignore_eos=True), prompts)
        return [reply["output_ids"] for reply in replies]


@torch.no_grad()
def assert_greedy(reference: ReferenceModel, prompt: list[int], output: list[int]) -> None:
    """Each output token is the reference's choice after all that stands before it: then the whole output is, by
    induction, the reference's greedy continuation."""
    logits = reference(torch.tensor([prompt + output[:-1]]))[0, len(prompt) - 1 :]
    best = logits.topk(2)
    wrong = [i for i, token in enumerate(output) if best.indices[i, 0] != token]
    gaps = [float(best.values[i, 0] - best.values[i, 1]) for i in wrong[:1]]
    assert not wrong, f"first difference at token {wrong[0]}, where the two best logits are {gaps[0]:.2e} apart"


def log_lines(log: Path, word: str) -> list[str]:
    return [line for line in log.read_text(errors="replace").splitlines() if word in line]


def assert_idle(server: Server) -> None:
    """No request runs or waits, no KV slot is in use, and none is lost: what is not free is evictable."""
    deadline = time.monotonic() + 20
    while True:
        load = request(f"{server.url}/v1/loads")["loads"][0]
        state = {k: load[k] for k in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "token_usage")}
        if not any(state.values()) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert not any(state.values()), state
