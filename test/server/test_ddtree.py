# SPDX-License-Identifier: Apache-2.0
"""DDTREE in the real server: the tokens of plain decoding, whatever a request asks for, on one and two ranks."""

from __future__ import annotations

import json
import random
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from conftest import SMALL, TOKENS, assert_greedy, assert_idle, outputs_of
from prompts import held_out_prompts, held_out_tokens, tokenizer
from reference import ReferenceModel
from server import TINY_DRAFTER, Server, request, running
from sglang_kdtree import cli

RUNNING = ("--max-running-requests", "40")


def ddtree(width: int) -> tuple[str, ...]:
    return (
        *("--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(TINY_DRAFTER)),
        *("--speculative-num-draft-tokens", str(width)),
    )


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("ddtree") / "log"
    with Server(log, *SMALL, *ddtree(16), *RUNNING) as server:
        yield server
        assert_idle(server)


def tokens_a_round(replies: list[dict[str, Any]]) -> float:
    """The mean number of tokens that a target forward yields; the first token of a request is its prefill's."""
    tokens = sum(r["meta_info"]["completion_tokens"] - 1 for r in replies)
    return tokens / sum(r["meta_info"]["spec_verify_ct"] for r in replies)


def test_trees_give_the_same_tokens(
    trees: Server, prompts: list[list[int]], plain_outputs: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    replies = [trees.generate(prompt, TOKENS, ignore_eos=True) for prompt in prompts]
    assert [reply["output_ids"] for reply in replies] == plain_outputs
    with capsys.disabled():
        print(f"\nDDTREE, width 16: {tokens_a_round(replies):.2f} tokens a round over {len(prompts)} prompts")
    assert tokens_a_round(replies) > 1.5  # a drafter that reads a wrong cache or wrong features gets about 1


def test_trees_in_a_batch_give_the_same_tokens(
    trees: Server, prompts: list[list[int]], plain_outputs: list[list[int]]
) -> None:
    assert outputs_of(trees, prompts, in_flight=8) == plain_outputs


def test_chunked_prefill_behind_a_cached_prefix(trees: Server, reference: ReferenceModel) -> None:
    """The drafter's cache has the prefix too, or its drafts would be worthless."""
    long = held_out_tokens()[0][:1700]
    for length in (300, 1000, 1700):  # each begins with the one before: the radix cache holds its prefix
        reply = trees.generate(long[:length], 64, ignore_eos=True)
        assert_greedy(reference, long[:length], reply["output_ids"])
        assert tokens_a_round([reply]) > 1.5
    assert reply["meta_info"]["cached_tokens"] >= 1000


def test_max_new_tokens_inside_an_accepted_path(trees: Server, plain_outputs: list[list[int]], prompts: Any) -> None:
    for count in range(1, 12):
        assert trees.generate(prompts[3], count, ignore_eos=True)["output_ids"] == plain_outputs[3][:count]


def test_stop_string_and_stop_token_inside_an_accepted_path(trees: Server, plain: Server) -> None:
    prompt = "import os\nimport sys\n\ndef main("
    for stop in ({"stop": ["\n"]}, {"stop": [":", "return"]}, {"stop_token_ids": tokenizer().encode("\n").ids}):
        ours, theirs = (server.generate(prompt, 48, **stop) for server in (trees, plain))
        assert ours["text"] == theirs["text"]
        assert ours["meta_info"]["finish_reason"] == theirs["meta_info"]["finish_reason"]


def test_eos_ends_a_request_unless_it_is_told_not_to(trees: Server, plain: Server) -> None:
    prompt = "<|bos|><|user|>What does the function join of os.path do?<|assistant|>"
    eager = {"logit_bias": {"1": 2.0}}  # towards <|eos|>, or the tiny model goes on for long
    lengths = []
    for extra in ({}, {"min_new_tokens": 40}, {"ignore_eos": True}):
        ours, theirs = (server.generate(prompt, 60, **eager, **extra) for server in (trees, plain))
        assert ours["output_ids"] == theirs["output_ids"], extra
        lengths.append(len(ours["output_ids"]))
    assert lengths[0] < 40 <= lengths[1] and lengths[2] == 60


def test_logit_bias(trees: Server, plain: Server) -> None:
    prompt = "import os\nimport sys\n"
    first = plain.generate(prompt, 1)["output_ids"][0]
    bias = {"logit_bias": {str(first): -100.0, "300": 2.0}}
    ours, theirs = (server.generate(prompt, 48, ignore_eos=True, **bias) for server in (trees, plain))
    assert ours["output_ids"] == theirs["output_ids"] and first not in ours["output_ids"]


def test_grammars(trees: Server, plain: Server) -> None:
    number = r"\[[0-9]{3}, [0-9]{2}\]"
    assert re.fullmatch(number, trees.generate("numbers = ", 32, regex=number)["text"])
    schema = json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
            "required": ["name", "size"],
            "additionalProperties": False,
        }
    )
    ours, theirs = (server.generate("config = ", 96, json_schema=schema) for server in (trees, plain))
    assert ours["text"] == theirs["text"]
    if ours["meta_info"]["finish_reason"]["type"] == "stop":
        assert set(json.loads(ours["text"])) == {"name", "size"}


def test_logprobs(trees: Server, plain: Server) -> None:
    body = {
        "text": "class Queue:\n    def ",
        "sampling_params": {"max_new_tokens": 32, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 3,
    }
    ours, theirs = (request(f"{server.url}/generate", body)["meta_info"] for server in (trees, plain))
    for key in ("output_token_logprobs", "output_top_logprobs"):
        assert len(ours[key]) == len(theirs[key]) == 32
    for mine, other in zip(ours["output_token_logprobs"], theirs["output_token_logprobs"], strict=True):
        assert mine[1] == other[1] and mine[0] == pytest.approx(other[0], abs=1e-4)
    for mine, other in zip(ours["output_top_logprobs"], theirs["output_top_logprobs"], strict=True):
        assert [entry[0] for entry in mine] == pytest.approx([entry[0] for entry in other], abs=1e-4)


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
def test_penalties_are_refused_and_hurt_nobody(
    trees: Server, penalty: str, prompts: list[list[int]], plain_outputs: list[list[int]]
) -> None:
    def ask() -> None:
        with pytest.raises(urllib.error.HTTPError) as refused:
            trees.generate(prompts[1], 32, **{penalty: 1.5})
        assert refused.value.code == 400 and f"DDTREE does not serve {penalty}" in refused.value.read().decode()

    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(trees.generate, p, TOKENS, ignore_eos=True) for p in prompts[:3]]
        pool.submit(ask).result()
    assert [other.result()["output_ids"] for other in others] == plain_outputs[:3]


def churn(server: Server, count: int) -> None:
    """`count` requests, of which every third is given up in the middle of its stream; nothing stays in use."""
    rng = random.Random(count)
    texts = held_out_tokens()

    def one(number: int) -> None:
        prompt = texts[number % 7][: rng.randint(5, 300)]
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": rng.randint(1, 60), "temperature": 0.8}}
        if number % 3:
            request(f"{server.url}/generate", body)
            return
        body["sampling_params"]["max_new_tokens"], body["stream"] = 1500, True
        text = json.dumps(body)
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(f"{head}\r\n\r\n{text}".encode())
            connection.recv(200)
            time.sleep(rng.random() / 4)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(one, range(count)))
    assert_idle(server)


def free_slots(server: Server) -> int:
    """Slots that are free once the radix cache is dropped."""
    with urllib.request.urlopen(urllib.request.Request(f"{server.url}/flush_cache", method="POST"), timeout=60):
        pass
    load = request(f"{server.url}/v1/loads")["loads"][0]
    return load["max_total_num_tokens"] - load["num_used_tokens"]


def test_no_slot_is_lost(trees: Server, reference: ReferenceModel, prompts: list[list[int]]) -> None:
    before = free_slots(trees)
    churn(trees, 60)
    assert free_slots(trees) == before
    assert_greedy(reference, prompts[2], trees.generate(prompts[2], 32, ignore_eos=True)["output_ids"])


@pytest.mark.long
def test_no_slot_is_lost_in_500_requests(trees: Server) -> None:
    before = free_slots(trees)
    churn(trees, 500)
    assert free_slots(trees) == before


def test_pages_two_ranks_and_no_overlap_give_the_same_tokens(
    tmp_path: Path, prompts: list[list[int]], plain_outputs: list[list[int]]
) -> None:
    common = (*SMALL, *RUNNING)
    servers = {
        "pages": Server(tmp_path / "pages", *common, *ddtree(17), "--page-size", "64", "--disable-overlap-schedule"),
        "ranks": Server(tmp_path / "ranks", *common, *ddtree(8), "--enable-metrics", tp=2),
    }
    with running(servers):
        for name, server in servers.items():
            assert outputs_of(server, prompts[:20], in_flight=4) == plain_outputs[:20], name
        assert_operator_sees_both_ranks(servers["ranks"].url)


def assert_operator_sees_both_ranks(url: str) -> None:
    """`sglang-kdtree check`, and what the metrics say of the rounds."""
    assert cli.main(["check", "--url", url]) == 0
    assert {"ranks": "[0, 1] of 2", "mode": "native"}.items() <= {f.name: f.detail for f in cli.check(url)}.items()
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(cli.fetch(f"{url}/metrics")):
        for sample in family.samples:
            key = sample.name.removeprefix("sglang:") + sample.labels.get("forward_mode", "")
            values[key] = values.get(key, 0) + sample.value
    assert values["ddtree_width"] == 2 * 8  # of both ranks
    rounds, tokens = values["ddtree_tokens_per_round_count"], values["ddtree_tokens_per_round_sum"]
    assert rounds > 100 and 1.2 < tokens / rounds < 8
    # One step verifies the trees of all requests in flight.
    assert rounds / 4 <= values["kdtree_mla_steps_totaltarget_verify"] <= rounds
    assert values["kdtree_mla_rows_totaltarget_verify"] == 8 * rounds


def test_ranks_that_see_near_ties_otherwise_stay_together(tmp_path: Path, prompts: list[list[int]]) -> None:
    """Rank 1's logits and drafts differ by a rounding, where ties abound: rank 0 decides, and nobody hangs."""
    here = {"PYTHONPATH": str(Path(__file__).parent / "perturbed_rank")}
    outputs = []
    for perturb in ("0", "1"):
        log = tmp_path / f"log{perturb}"
        with Server(log, *SMALL, *RUNNING, *ddtree(16), tp=2, env=here | {"PERTURB": perturb}) as server:
            outputs.append([server.generate(p, 48, ignore_eos=True)["output_ids"] for p in prompts[:8]])
    assert outputs[0] == outputs[1]


@pytest.mark.long
def test_200_prompts_at_every_width(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """128 tokens after each of 200 prompts: the tokens of plain decoding. A tree of the width of the block accepts at
    least a tenth more than the chain of the same drafter, and a wider one no less than the chain."""
    prompts = held_out_prompts(200)
    with Server(tmp_path / "plain", *SMALL, *RUNNING) as server:
        want = outputs_of(server, prompts, 128, in_flight=8)
    rates = {}
    chain = Server(tmp_path / "chain", *SMALL, *RUNNING, *ddtree(16), env={"KDTREE_BRANCHING": "1"})
    servers = {"chain": chain} | {
        n: Server(tmp_path / f"{n}", *SMALL, *RUNNING, *ddtree(n)) for n in (2, 8, 16, 17, 32)
    }
    for name, server in servers.items():
        with server, ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(lambda p: server.generate(p, 128, ignore_eos=True), prompts))  # noqa: B023
        assert [reply["output_ids"] for reply in replies] == want, name
        rates[name] = tokens_a_round(replies)
    with capsys.disabled():
        print("\ntokens a round, 200 held-out prompts, 128 tokens each:")
        for name, rate in rates.items():
            print(f"  {name if name == 'chain' else f'width {name}':>8}  {rate:.2f}")
    assert rates[16] >= 1.1 * rates["chain"]
    assert min(rates[17], rates[32]) >= rates["chain"]
