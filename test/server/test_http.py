# SPDX-License-Identifier: Apache-2.0
"""The real server over HTTP: SGLang's own route and OpenAI's, with the official client."""

from __future__ import annotations

import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import BadRequestError, OpenAI

from conftest import assert_greedy, assert_idle
from prompts import held_out_tokens, tokenizer
from reference import ReferenceModel
from server import Server, request

CONTEXT = 2048


@pytest.fixture(scope="module")
def client(plain: Server) -> OpenAI:
    return OpenAI(base_url=f"{plain.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(autouse=True)
def nothing_is_left_in_use(plain: Server) -> Iterator[None]:
    yield
    assert_idle(plain)


def test_generate(plain: Server, reference: ReferenceModel) -> None:
    prompt = "import os\nimport sys\n\ndef main("
    reply = plain.generate(prompt, 32)
    assert_greedy(reference, tokenizer().encode(prompt).ids, reply["output_ids"])
    assert reply["text"] == tokenizer().decode(reply["output_ids"])
    assert reply["meta_info"]["completion_tokens"] == 32


def test_generate_stream_gives_the_same_text(plain: Server) -> None:
    whole = plain.generate("class Queue:\n", 40)["text"]
    body = {"text": "class Queue:\n", "sampling_params": {"max_new_tokens": 40, "temperature": 0}, "stream": True}
    post = urllib.request.Request(
        f"{plain.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(post, timeout=60) as reply:
        lines = [line[6:] for line in reply.read().decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]" and len(lines) > 10
    assert json.loads(lines[-2])["text"] == whole


def test_completions(client: OpenAI, plain: Server) -> None:
    prompt = "import unittest\n\nclass Test"
    reply = client.completions.create(model="default", prompt=prompt, max_tokens=24, temperature=0)
    assert reply.choices[0].text == plain.generate(prompt, 24)["text"]
    assert reply.usage.completion_tokens == 24
    parts = client.completions.create(model="default", prompt=prompt, max_tokens=24, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in parts) == reply.choices[0].text


def test_chat(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "What does the function join of os.path do?"}]
    reply = client.chat.completions.create(model="default", messages=messages, max_tokens=48, temperature=0)
    text = reply.choices[0].message.content
    assert text and "<|" not in text
    parts = client.chat.completions.create(
        model="default", messages=messages, max_tokens=48, temperature=0, stream=True
    )
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text


def test_completions_look_like_the_training_text(plain: Server) -> None:
    """Python in, Python out: several openings continue with what the standard library is made of."""
    openings = ("import os\nimport sys\n\ndef main(", "class TestQueue(unittest.TestCase):\n    def test_", "try:\n")
    text = "".join(plain.generate(opening, 64)["text"] for opening in openings)
    assert sum(word in text for word in ("self", "return", "def ", "import ", '"""', "except", "assert")) >= 3


def test_32_concurrent_requests_with_shared_prefixes(plain: Server, reference: ReferenceModel) -> None:
    shared = held_out_tokens()[3][:120]
    tails = [held_out_tokens()[4 + i % 4][10 + i : 20 + 2 * i] for i in range(32)]
    prompts = [shared[: 40 + 20 * (i % 5)] + tail for i, tail in enumerate(tails)]
    with ThreadPoolExecutor(32) as pool:
        replies = list(pool.map(lambda p: plain.generate(p, 24, ignore_eos=True), prompts))
    for prompt, reply in zip(prompts, replies, strict=True):
        assert_greedy(reference, prompt, reply["output_ids"])
    assert sum(reply["meta_info"]["cached_tokens"] for reply in replies) > 1000


def test_aborted_requests_hurt_nobody(plain: Server, reference: ReferenceModel) -> None:
    """Clients that hang up in the middle of a stream, and one request aborted by its id."""
    prompt = held_out_tokens()[5][:50]

    def hang_up(number: int) -> None:
        body = json.dumps(
            {
                "input_ids": [*prompt, 100 + number],
                "sampling_params": {"max_new_tokens": 1500, "temperature": 0, "ignore_eos": True},
                "stream": True,
            }
        )
        with socket.create_connection(("127.0.0.1", plain.port)) as connection:
            head = (
                f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            )
            connection.sendall(f"{head}\r\n\r\n{body}".encode())
            connection.recv(200)

    with ThreadPoolExecutor(10) as pool:
        aborted = [pool.submit(hang_up, i) for i in range(8)]
        rid = {"rid": "to-be-aborted", "input_ids": prompt}
        params = {"max_new_tokens": 1500, "temperature": 0, "ignore_eos": True}
        by_id = pool.submit(request, f"{plain.url}/generate", rid | {"sampling_params": params})
        whole = pool.submit(plain.generate, prompt, 200, ignore_eos=True)
        time.sleep(0.5)
        request(f"{plain.url}/abort_request", {"rid": "to-be-aborted"})
        for future in aborted:
            future.result()
        assert by_id.result()["meta_info"]["finish_reason"]["type"] == "abort"
        assert_greedy(reference, prompt, whole.result()["output_ids"])


def test_prompt_at_the_context_limit(plain: Server, reference: ReferenceModel) -> None:
    """The longest prompt: upstream keeps six tokens of the context back, and ends the answer where they begin."""
    prompt = held_out_tokens()[0][: CONTEXT - 7]
    reply = plain.generate(prompt, 7, ignore_eos=True)
    assert reply["meta_info"]["finish_reason"]["type"] == "length"
    assert len(prompt) + len(reply["output_ids"]) in range(CONTEXT - 6, CONTEXT + 1)
    assert_greedy(reference, prompt, reply["output_ids"])


def test_prompt_beyond_the_context_limit_is_refused(plain: Server, client: OpenAI) -> None:
    prompt = held_out_tokens()[0][: CONTEXT + 10]
    assert len(prompt) == CONTEXT + 10
    with pytest.raises(urllib.error.HTTPError) as refused:
        plain.generate(prompt, 4)
    assert refused.value.code == 400 and "2048" in refused.value.read().decode()
    with pytest.raises(BadRequestError, match="2048"):
        client.completions.create(model="default", prompt=prompt, max_tokens=4)
    assert plain.generate(prompt[:20], 4)["meta_info"]["completion_tokens"] == 4


def test_grammar_is_kept(plain: Server) -> None:
    assert re.fullmatch(
        r"\[[0-9]{3}, [0-9]{2}\]", plain.generate("numbers = ", 32, regex=r"\[[0-9]{3}, [0-9]{2}\]")["text"]
    )


def test_sampled_tokens_come_with_logprobs(plain: Server) -> None:
    body = {
        "text": "def ",
        "sampling_params": {"max_new_tokens": 8, "temperature": 1.0, "top_p": 0.9},
        "return_logprob": True,
    }
    reply = request(f"{plain.url}/generate", body)
    logprobs = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
    assert len(logprobs) == 8 and all(p <= 0 for p in logprobs)
