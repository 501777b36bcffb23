# SPDX-License-Identifier: Apache-2.0
"""The operator's tool, `sglang-kdtree`.

    sglang-kdtree doctor [--json]               is this installation whole, and does its kernel compute what it should?
    sglang-kdtree check --url URL [--json]      does every rank of a running server run what it should?

Both end with 0 if all is well, 1 if something is not, and 2 for a bad command line.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from typing import Any

from sglang_kdtree import metrics, vendored

HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
WIDTHS = (1, 8, 16, 32, 64, 256)
TOLERANCE = 5e-3  # relative error in bf16


@dataclass
class Finding:
    """One thing that was looked at. ok: None where it is only told."""

    name: str
    ok: bool | None
    detail: str


def attempt(name: str, function: Any) -> Finding:
    """The finding of a function that returns its detail or raises."""
    try:
        return Finding(name, True, function())
    except Exception as error:  # whatever is wrong is what a doctor is asked for
        return Finding(name, False, f"{type(error).__name__}: {error}")


def versions() -> list[Finding]:
    import torch

    found = [Finding("python", None, platform.python_version()), Finding("torch", None, torch.__version__)]
    found.append(Finding("CUDA of torch", None, str(torch.version.cuda)))
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        driver = torch._C._cuda_getDriverVersion()
        found.append(Finding("GPU", None, f"{torch.cuda.get_device_name()}, sm_{major}{minor}"))
        found.append(Finding("CUDA of the driver", None, f"{driver // 1000}.{driver % 1000 // 10}"))
    else:
        found.append(Finding("GPU", None, "none"))
    found.append(Finding("fork", None, metrics.version()))
    return found


def check_vendored() -> str:
    vendored.check()
    return ", ".join(f"{name} {entry['version']}" for name, entry in vendored.locked().items())


def check_kernels() -> str:
    import torch

    from sglang_kdtree import plugin

    plugin.load_kernels()
    if torch.cuda.is_available():
        return f"kdtree_mla_verify on cuda: {torch.ops.sgl_kernel.kdtree_mla_cuda_variant(0)}"
    return f"kdtree_mla_verify on cpu: {torch.ops.sgl_kernel.kdtree_mla_cpu_variant()}"


def check_registered() -> str:
    from importlib.metadata import entry_points

    names = [point.name for point in entry_points(group="sglang.srt.plugins") if "sglang_kdtree" in point.value]
    if not names:
        raise RuntimeError("no entry point of this fork in the group sglang.srt.plugins. Reinstall it.")
    return "entry point " + ", ".join(names)


def instantiations() -> str:
    """The tile that each head count and width takes, and its shared memory, on this GPU."""
    import torch

    if not torch.cuda.is_available():
        return "the CPU kernel has one for all shapes"
    shapes: dict[tuple[int, int], list[str]] = {}
    for heads in HEADS:
        for width in WIDTHS:
            plan = torch.ops.sgl_kernel.kdtree_mla_plan(heads, width, 1, 1)
            shapes.setdefault((plan[0], plan[5]), []).append(f"{heads}x{width}")
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    for (rows, shared), _ in shapes.items():
        if shared > limit:
            raise RuntimeError(f"the tile of {rows} rows takes {shared} B of shared memory, this GPU gives {limit}")
    return "; ".join(
        f"{rows} rows ({shared} B of shared memory): heads x width {' '.join(which)}"
        for (rows, shared), which in shapes.items()
    )


def self_test() -> str:
    """A tree of 8 nodes behind 300 tokens, 4 heads, in bf16, against the oracle in float64."""
    import numpy as np
    import torch

    from kdtree_spec import oracle

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    heads, width, prefix, batch = 4, 8, 300, 2
    q = torch.randn(batch * width, heads, 576, generator=generator).bfloat16()
    cache = torch.randn(1024, 1, 576, generator=generator).bfloat16()
    table = torch.randperm(1024, generator=generator)[: batch * 400].view(batch, 400).int()
    lens, rows = torch.tensor([prefix, 17]), torch.arange(batch)
    tree = oracle.ancestor_mask([-1, 0, 0, 1, 1, 2, 3, 6])
    mask = np.concatenate([tree] * batch)
    packed = torch.from_numpy(oracle.pack_tree_mask(mask))
    out = torch.full((batch * width, heads, 512), float("nan"), dtype=torch.bfloat16, device=device)
    workspace = None
    if device == "cuda":
        size = torch.ops.sgl_kernel.kdtree_mla_workspace_bytes(heads, width, 0)
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
    on = [t.to(device) for t in (q, cache, table, rows)]
    torch.ops.sgl_kernel.kdtree_mla_verify(*on, 1, lens.to(device), packed.to(device), 0.05, 1.0, out, None, workspace)
    want, _ = oracle.mla_verify(
        q.double().numpy(), cache.double().numpy(), table.numpy(), rows.numpy(), 1, lens.numpy(), mask, 0.05
    )
    error = float(np.abs(out.double().cpu().numpy() - want).max() / np.abs(want).max())
    if not error <= TOLERANCE:
        raise RuntimeError(f"relative error {error:.2e}, over {TOLERANCE:.0e}")
    return f"relative error {error:.1e} against the oracle, on {device}"


def doctor() -> list[Finding]:
    found = versions()
    checks = {"vendored tree": check_vendored, "kernel library": check_kernels, "plug-in": check_registered}
    checks |= {"instantiations": instantiations, "self-test": self_test}
    return found + [attempt(name, function) for name, function in checks.items()]


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as reply:
        return reply.read().decode()


def rank_infos(text: str) -> list[dict[str, str]]:
    """The labels of each rank's sglang:kdtree_mla_info in a /metrics reply."""
    from prometheus_client.parser import text_string_to_metric_families

    return [
        sample.labels
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "sglang:kdtree_mla_info" and sample.value == 1
    ]


def judge(infos: list[dict[str, str]]) -> list[Finding]:
    """Are all ranks there, and do they run the same?"""
    if not infos:
        reason = "no rank reports kdtree_mla: it does not run, or the server was started without --enable-metrics"
        return [Finding("ranks", False, reason)]
    size = int(infos[0]["tp_size"])
    ranks = sorted(int(info["tp_rank"]) for info in infos)
    found = [Finding("ranks", ranks == list(range(size)), f"{ranks} of {size}")]
    for field in ("version", "mode", "kernel", "device", "kv_cache"):
        values = sorted({info[field] for info in infos})
        found.append(Finding(field, len(values) == 1, ", ".join(values)))
    found += [
        Finding(f"rank {info['tp_rank']}", None, f"pid {info['worker_pid']}")
        for info in sorted(infos, key=lambda i: int(i["tp_rank"]))
    ]
    return found


def check(url: str) -> list[Finding]:
    try:
        return judge(rank_infos(fetch(url.rstrip("/") + "/metrics")))
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        return [Finding("server", False, f"{url}: {error}")]


def report(found: list[Finding], as_json: bool) -> int:
    """Print, and return the exit status."""
    failed = any(finding.ok is False for finding in found)
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in found]}, indent=1))
    else:
        for finding in found:
            mark = {True: "ok", False: "FAILED", None: ""}[finding.ok]
            print(f"{finding.name:20} {mark:7} {finding.detail}")
    return int(failed)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sglang-kdtree", description="Is the backend kdtree_mla what runs?")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor_parser = commands.add_parser("doctor", help="look at this installation")
    check_parser = commands.add_parser("check", help="look at all ranks of a running server")
    check_parser.add_argument("--url", default="http://127.0.0.1:30000", help="the server's (default: %(default)s)")
    for p in (doctor_parser, check_parser):
        p.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)
    return report(doctor() if args.command == "doctor" else check(args.url), args.json)


if __name__ == "__main__":
    sys.exit(main())
