# SPDX-License-Identifier: Apache-2.0
"""The ways to a server with the backend. (`python -m sglang.launch_server` and `sglang serve` are in test_greedy.)"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import SMALL, assert_greedy, log_lines, outputs_of
from reference import ReferenceModel
from server import TINY_MODEL, Server, cpu_environment

ENGINE = """
import json, sys
import sglang

if __name__ == "__main__":
    engine = sglang.Engine(model_path=sys.argv[1], device="cpu", dtype="float32", attention_backend="kdtree_mla",
                           max_total_tokens=8192, context_length=2048)
    prompts = json.loads(sys.argv[2])
    params = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
    replies = engine.generate(input_ids=prompts, sampling_params=params)
    print("OUTPUT", json.dumps([reply["output_ids"] for reply in replies]), flush=True)
    engine.shutdown()
"""


def test_engine(tmp_path: Path, prompts: list[list[int]], reference: ReferenceModel) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    command = [sys.executable, str(script), str(TINY_MODEL), json.dumps(prompts[:4])]
    done = subprocess.run(command, env=cpu_environment(), capture_output=True, text=True, cwd="/", timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("OUTPUT "))
    for prompt, output in zip(prompts[:4], json.loads(line[7:]), strict=True):
        assert_greedy(reference, prompt, output)


@pytest.mark.parametrize(
    "speculation", [(), ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")]
)
def test_decode_backend_beside_another_prefill_backend(
    tmp_path: Path, prompts: list[list[int]], reference: ReferenceModel, speculation: tuple[str, ...]
) -> None:
    backend = ("--prefill-attention-backend", "torch_native_mla", "--decode-attention-backend", "kdtree_mla")
    if speculation:
        speculation += ("--speculative-attention-mode", "decode")
    env = {"PYTHONPATH": str(Path(__file__).parent / "reference_prefill")}
    with Server(tmp_path / "log", *SMALL, *speculation, backend=backend, env=env) as server:
        for prompt, output in zip(prompts[:8], outputs_of(server, prompts[:8]), strict=True):
            assert_greedy(reference, prompt, output)
        assert len(log_lines(server.log, "kdtree_mla: rank=0/1")) == 1
        assert log_lines(server.log, "reference_prefill: prefilling")


def test_help_lists_the_backend() -> None:
    command = [sys.executable, "-m", "sglang.launch_server", "--help"]
    text = subprocess.run(command, env=cpu_environment(), capture_output=True, text=True, cwd="/").stdout
    choices = text.split("--attention-backend", 1)[1].split("}", 1)[0]
    assert "kdtree_mla" in choices and "triton" in choices


def test_bfloat16_serves_text(tmp_path: Path) -> None:
    """The type that models are served in; its tokens are not compared: near-ties fall either way."""
    with Server(tmp_path / "log", *SMALL, dtype="bfloat16") as server:
        reply = server.generate("import os\nimport sys\n\ndef main(", 48)
        assert reply["meta_info"]["completion_tokens"] == 48
        assert sum(word in reply["text"] for word in ("self", "return", "def ", "import ", '"""', "path")) >= 1
        assert "kv_cache=bfloat16" in server.log_text()
