# SPDX-License-Identifier: Apache-2.0
"""The built CUDA library without a GPU: resources of the sm_120a code, the plan of every shape, argument checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
LIBRARY = ROOT / "sgl-kernel" / "python" / "sgl_kernel" / "kdtree_cuda.so"

sys.path.insert(0, str(ROOT / "sgl-kernel"))
import kernel_resources  # noqa: E402


def in_fresh_process(code: str) -> str:
    """What the code prints; the CPU library, which defines the same op, is not loaded there."""
    prelude = f"import torch\ntorch.ops.load_library({str(LIBRARY)!r})\nops = torch.ops.sgl_kernel\n"
    done = subprocess.run([sys.executable, "-c", prelude + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def kernels() -> list[kernel_resources.Kernel]:
    return kernel_resources.read_kernels("sm_120a")


def test_every_sm_120a_kernel_keeps_within_a_blocks_limits(kernels: list[kernel_resources.Kernel]) -> None:
    assert len([k for k in kernels if k.name == "verify_kernel"]) == 4  # two types, two tiles
    for kernel in kernels:
        assert kernel.faults() == [], kernel


def test_a_kernel_that_does_not_fit_is_found(kernels: list[kernel_resources.Kernel]) -> None:
    from dataclasses import replace

    fine = next(k for k in kernels if k.name == "verify_kernel")
    none = dict.fromkeys(fine.instructions, 0)
    for change, message in [
        ({"stack": 8}, "spills"),
        ({"instructions": fine.instructions | {"STL": 1}}, "spills"),
        ({"shared": 101_377}, "over 101376"),
        ({"registers": 264}, "warps an SM"),
        ({"instructions": none}, "HMMA"),
    ]:
        assert any(message in fault for fault in replace(fine, **change).faults()), change


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100"])
def test_code_for_the_other_architectures_is_in_the_library(arch: str) -> None:
    names = [k.name for k in kernel_resources.read_kernels(arch)]
    assert names.count("verify_kernel") == 4 and names.count("combine_kernel") == 4


def test_every_shape_has_a_plan_that_fits_sm_120() -> None:
    """All heads and widths, on GPUs of 1 to 400 SMs: the rows are covered, the device is filled, memory is bounded."""
    printed = in_fresh_process("""
for processors in (1, 68, 108, 132, 148, 188, 400):
    for heads in range(1, 129):
        for width in range(1, 257) if processors == 188 else (1, 2, 7, 16, 33, 100, 256):
            rows, row_blocks, groups, blocks, workspace, shared, traffic = ops.kdtree_mla_plan(
                heads, width, processors, processors)
            assert rows * (row_blocks - 1) < heads * width <= rows * row_blocks
            assert groups >= 1 and 1 <= blocks <= processors and blocks <= groups * row_blocks
            assert groups == 1 or groups * row_blocks <= 4 * processors
            assert shared <= 101376 and workspace <= 2 * 4 * processors * 64 * 514 * 4
            if processors >= 68 and row_blocks <= processors // 8:
                assert groups * row_blocks >= 0.85 * processors
print("all")
""")
    assert printed.strip() == "all"


def test_bad_arguments_are_named() -> None:
    printed = in_fresh_process("""
def m(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")
good = dict(q=m(8, 4, 576), kv_cache=m(100, 1, 576), slot_table=m(2, 50, dtype=torch.int32),
            table_rows=m(2, dtype=torch.int64), page=1, prefix_lens=m(2, dtype=torch.int64), tree_mask=None,
            sm_scale=0.1, k_scale=1.0, out=m(8, 4, 512), lse=None, workspace=None)
ops.kdtree_mla_verify(**good)
bad = [dict(q=m(8, 4, 570)), dict(q=m(8, 4, 576, dtype=torch.float32), kv_cache=m(100, 1, 576, dtype=torch.float32),
       out=m(8, 4, 512, dtype=torch.float32)), dict(q=m(8, 4, 1152)[..., ::2]),
       dict(kv_cache=m(100, 1, 580)[..., :576]), dict(tree_mask=m(8, 2, dtype=torch.int32)),
       dict(sm_scale=float("nan"))]
for change in bad:
    try:
        ops.kdtree_mla_verify(**(good | change))
        print("no error", change)
    except RuntimeError as error:
        print(str(error).splitlines()[0])
for heads, width in ((129, 1), (1, 257), (0, 1)):
    try:
        ops.kdtree_mla_plan(heads, width, 1, 1)
        print("no error", heads, width)
    except RuntimeError as error:
        print(str(error).splitlines()[0])
""").splitlines()
    expected = [
        "q must be [batch * width, heads, 576]",
        "q must be bfloat16 or float16 on CUDA, is float32",
        "q must have a contiguous last dimension",
        "kv_cache must have rows at multiples of 16 bytes",
        "tree_mask must be contiguous int32 [8, 1]",
        "sm_scale and k_scale must be finite",
        "heads must be 1 to 128, is 129",
        "width must be 1 to 256, is 257",
        "heads must be 1 to 128, is 0",
    ]
    assert len(printed) == len(expected)
    for line, want in zip(printed, expected, strict=True):
        assert want in line


def test_a_machine_without_a_gpu_is_told_so() -> None:
    printed = in_fresh_process("""
if torch.cuda.is_available():
    print("no CUDA device 99: there is a GPU here")
else:
    try:
        ops.kdtree_mla_workspace_bytes(8, 16, 0)
    except RuntimeError as error:
        print(error)
""")
    assert "no CUDA device" in printed
