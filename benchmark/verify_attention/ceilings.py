# SPDX-License-Identifier: Apache-2.0
"""What the GPU can do, measured: bf16 operations a second of mma.sync, and bytes a second read from device memory."""

from __future__ import annotations

import ctypes
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("ceilings.cu")


def build() -> ctypes.CDLL:
    """Compile ceilings.cu for this GPU with the nvcc on the PATH, or of the virtual environment."""
    nvcc = shutil.which("nvcc") or next(
        (str(p) for p in Path(torch.__file__).parents[1].glob("nvidia/cu13/bin/nvcc")), None
    )
    if nvcc is None:
        raise SystemExit("nvcc is not on the PATH: put it there, it compiles the loops that measure the ceilings")
    major, minor = torch.cuda.get_device_capability()
    folder = Path(tempfile.mkdtemp())
    library = folder / "ceilings.so"
    architecture = f"sm_{major}{minor}{'a' if major >= 12 else ''}"
    subprocess.run(
        [nvcc, "-O3", f"-arch={architecture}", "-shared", "-Xcompiler", "-fPIC", "-o", library, SOURCE], check=True
    )
    loaded = ctypes.CDLL(str(library))
    shutil.rmtree(folder)
    return loaded


def _fastest(launch: Callable[[], int], repeats: int) -> float:
    """Median seconds of a launch, after a warm-up."""
    samples = []
    for i in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        if launch() != 0:
            raise RuntimeError("a ceiling loop could not be launched")
        end.record()
        end.synchronize()
        if i >= 3:
            samples.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(samples)


def measure() -> dict[str, float]:
    """{'mma_bf16_flops': operations a second, 'read_bytes': bytes a second}."""
    library = build()
    blocks = torch.cuda.get_device_properties(0).multi_processor_count * 2
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    iterations = 4000
    sink = torch.empty(blocks * 256, device="cuda")
    seconds = _fastest(
        lambda: library.launch_mma_loop(ctypes.c_void_p(sink.data_ptr()), blocks, iterations, stream), 10
    )
    flops = blocks * 8 * iterations * 16 * 4096 / seconds
    data = torch.randint(-(2**31), 2**31 - 1, (2**29,), dtype=torch.int32, device="cuda")  # 2 GiB
    size = ctypes.c_int64(data.numel() * 4)
    pointer = ctypes.c_void_p(data.data_ptr())
    seconds = _fastest(
        lambda: library.launch_read_loop(pointer, size, blocks, ctypes.c_void_p(sink.data_ptr()), stream), 10
    )
    return {"mma_bf16_flops": flops, "read_bytes": data.numel() * 4 / seconds}
