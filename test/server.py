# SPDX-License-Identifier: Apache-2.0
"""The real SGLang server: started by the tests, the benchmarks and `make serve`, and asked by `make ask`.

python test/server.py serve [--port 30000] [server flags]
python test/server.py ask "def main(" [--port 30000]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TINY_MODEL = ROOT / "test" / "models" / "tiny-mla"
TINY_DRAFTER = ROOT / "test" / "models" / "tiny-mla-dflash"
LAUNCH = ("-m", "sglang.launch_server")


def cpu_environment(tp: int = 1) -> dict[str, str]:
    """What SGLang's CPU engine needs. One thread a rank, bound to a core of its own: the tiny model has no work for
    more, and unbound threads cost it a factor of ten."""
    cores = sorted(os.sched_getaffinity(0))
    return os.environ | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(tp)),
        # A CUDA build of torch would start NCCL on CPU tensors if it found it.
        "SGLANG_NCCL_SO_PATH": "/nonexistent",
        "TORCH_COMPILE_DISABLE": "1",  # a minute of compiling, for a model that runs in milliseconds
        "HF_HUB_OFFLINE": "1",
    }


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def request(url: str, body: Any = None, timeout: float = 120) -> Any:
    """GET, or POST with a JSON body; the decoded JSON reply. Raises urllib.error.HTTPError."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=timeout
    ) as reply:
        text = reply.read().decode()
    return json.loads(text) if text else None


class ServerError(RuntimeError):
    """The server ended before it was ready; the message holds the end of its log."""


class Server:
    """A running server. Use as a context manager: ready on entry, stopped with all its processes on exit."""

    def __init__(
        self,
        log: Path,
        *flags: str,
        tp: int = 1,
        model: Path = TINY_MODEL,
        dtype: str = "float32",
        backend: tuple[str, ...] = ("--attention-backend", "kdtree_mla"),
        launch: tuple[str, ...] = LAUNCH,
        python: str = sys.executable,
        env: dict[str, str] | None = None,
        port: int | None = None,
        device: str = "cpu",
    ) -> None:
        self.log = log
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # fmt: off
        # --sleep-on-idle: a scheduler without work would keep a whole core busy.
        self.command = [python, *launch, "--device", device, "--model-path", str(model), "--dtype", dtype, *backend,
                        "--port", str(self.port), "--tp-size", str(tp), "--sleep-on-idle", *flags]
        # fmt: on
        self.env = (cpu_environment(tp) if device == "cpu" else os.environ | {"HF_HUB_OFFLINE": "1"}) | (env or {})
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("wb") as log:
            # A session of its own, so that stop() reaches every worker; a folder of its own, so that only what is
            # installed can be imported.
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, env=self.env, start_new_session=True, cwd="/"
            )

    def wait_ready(self, timeout: float = 300) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerError(f"exit status {self.process.returncode}\n{self.log_text()[-8000:]}")
            try:
                request(f"{self.url}/health_generate", timeout=30)
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
        raise ServerError(f"not ready after {timeout} s\n{self.log_text()[-8000:]}")

    def wait_exit(self, timeout: float) -> int:
        """The exit status; raises subprocess.TimeoutExpired if it goes on running."""
        return self.process.wait(timeout)

    def stop(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def __enter__(self) -> Server:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def generate(self, prompt: str | list[int], tokens: int = 32, **sampling: Any) -> dict[str, Any]:
        """One greedy completion through /generate."""
        key = "text" if isinstance(prompt, str) else "input_ids"
        params = {"max_new_tokens": tokens, "temperature": 0, **sampling}
        return request(f"{self.url}/generate", {key: prompt, "sampling_params": params})

    def generate_batch(self, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
        """Greedy completions of exactly `tokens` tokens, all in flight at once."""
        params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return request(f"{self.url}/generate", {"input_ids": prompts, "sampling_params": params}, timeout=600)


@contextlib.contextmanager
def running(servers: dict[str, Server], timeout: float = 300) -> Iterator[dict[str, Server]]:
    """Several servers side by side, started at once, as starting takes longer than most of what is asked of them."""
    try:
        for server in servers.values():
            server.start()
        for server in servers.values():
            server.wait_ready(timeout)
        yield servers
    finally:
        for server in servers.values():
            server.stop()


def serve(port: int, flags: list[str]) -> int:
    log = ROOT / ".cache" / "serve.log"
    log.parent.mkdir(exist_ok=True)
    # fmt: off
    server = Server(log, "--host", "127.0.0.1", "--max-total-tokens", "65536", "--context-length", "16384", *flags,
                    port=port)
    # fmt: on
    print(f"serve: starting on {server.url}, log in {log.relative_to(ROOT)}", flush=True)
    started = time.monotonic()
    server.start()
    ready = threading.Event()

    def report_progress() -> None:
        shown = 0
        while not ready.wait(1):
            for line in server.log_text()[shown:].splitlines(keepends=True):
                shown += len(line)
                if any(word in line for word in ("Load weight", "KV Cache", "kdtree_mla: ", "Traceback")):
                    print("  " + line.rstrip()[:160], flush=True)

    threading.Thread(target=report_progress, daemon=True).start()
    try:
        server.wait_ready()
        time.sleep(1.5)
        ready.set()
        body = json.dumps({"model": "default", "prompt": "import os\n", "max_tokens": 32, "temperature": 0})
        print(f"serve: ready after {time.monotonic() - started:.0f} s at {server.url}; try\n")
        print(f"  curl {server.url}/v1/completions -H 'Content-Type: application/json' -d '{body}'\n")
        print('serve: or make ask PROMPT="import os"; Ctrl-C stops the server', flush=True)
        return server.wait_exit(timeout=None)
    except KeyboardInterrupt:
        return 0
    except ServerError as error:
        print(f"serve: the server did not start: {error}", file=sys.stderr)
        return 1
    finally:
        server.stop()


def ask(prompt: str, port: int) -> int:
    body = {"model": "default", "prompt": prompt, "max_tokens": 64, "temperature": 0}
    try:
        reply = request(f"http://127.0.0.1:{port}/v1/completions", body)
    except urllib.error.HTTPError as error:
        print(f"ask: HTTP {error.code}: {error.read().decode()}", file=sys.stderr)
        return 1
    except (urllib.error.URLError, ConnectionError) as error:
        print(f"ask: no server on port {port} ({error}); run `make serve` first", file=sys.stderr)
        return 1
    print(prompt + reply["choices"][0]["text"])
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="The tiny model's server.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve_parser = commands.add_parser("serve", help="start the server; unknown flags go to SGLang")
    ask_parser = commands.add_parser("ask", help="print a completion of a running server")
    ask_parser.add_argument("prompt")
    for p in (serve_parser, ask_parser):
        p.add_argument("--port", type=int, default=30000)
    args, flags = parser.parse_known_args()
    return serve(args.port, flags) if args.command == "serve" else ask(args.prompt, args.port)


if __name__ == "__main__":
    sys.exit(main())
