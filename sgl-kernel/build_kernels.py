# SPDX-License-Identifier: Apache-2.0
"""Build the kernel libraries into the vendored sgl_kernel package. What `make kernels` runs; incremental; needs no GPU.

nvcc is the locked one of the virtual environment, so every machine builds with the same compiler.
CUDA_ARCHITECTURES, a list such as "120a;90", builds for fewer GPUs than all that are served.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
BUILD = HERE / "build" / "kernels"
PACKAGE = HERE / "python" / "sgl_kernel"
ARCHITECTURES = "120a;80;86;89;90;100"


def run(step: str, command: list[str]) -> str:
    """The command's output; what ninja builds is shown while it runs."""
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            lines.append(line)
            building = re.match(r"\[(\d+/\d+)\] Building \w+ object .*/(\S+)\.o", line)
            if building:
                print(f"kernels: {building[1]} {building[2]}", flush=True)
    if process.returncode != 0:
        sys.exit(f"{''.join(lines)}\nkernels: {step} failed (see above)")
    return "".join(lines)


def cuda_root() -> Path:
    """The folder of the CUDA compiler that requirements-dev.txt brings."""
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations if spec else []:
        root = Path(place) / "cu13"
        if (root / "bin" / "nvcc").exists():
            return root
    sys.exit("kernels: nvidia/cu13/bin/nvcc is not installed. Run `make kernels`, which installs it.")


def architectures() -> str:
    wanted = os.environ.get("CUDA_ARCHITECTURES") or ARCHITECTURES
    if not re.fullmatch(r"\d+a?(;\d+a?)*", wanted):
        sys.exit(f"kernels: CUDA_ARCHITECTURES must be a list such as '120a;90', is {wanted!r}")
    return wanted


def main() -> None:
    if not PACKAGE.is_dir():
        sys.exit(f"kernels: {PACKAGE} is not there. Run `make vendor`.")
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").exists():
        sys.exit(f"kernels: {include}/Python.h is not there. Install Python's headers (python3-dev).")
    if shutil.which("c++") is None and shutil.which("g++") is None:
        sys.exit("kernels: no C++ compiler. Install g++ 11 or newer.")
    tools = Path(sys.executable).parent
    cuda = cuda_root()
    archs = architectures()
    # fmt: off
    run("cmake", [str(tools / "cmake"), "-G", "Ninja", "-S", str(HERE), "-B", str(BUILD),
                  f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", f"-DTORCH_DIR={Path(torch.__file__).parent}",
                  f"-DPYTHON_INCLUDE={include}", f"-DOUTPUT_DIR={PACKAGE}",
                  f"-DCMAKE_CUDA_COMPILER={cuda / 'bin' / 'nvcc'}", f"-DCUDA_INCLUDE={cuda / 'include'}",
                  f"-DCMAKE_CUDA_FLAGS=-L{cuda / 'lib'}",
                  f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(f'{arch}-real' for arch in archs.split(';'))}"])
    # fmt: on
    output = run("the build", [str(tools / "ninja"), "-C", str(BUILD)])
    built = "up to date" if "no work to do" in output else "built"
    place = PACKAGE.relative_to(HERE.parent)
    print(f"kernels: {place}/common_ops.abi3.so {built} (CPU, torch {torch.__version__})")
    print(f"kernels: {place}/kdtree_cuda.so {built} (CUDA, {archs.replace(';', ' ')})")


if __name__ == "__main__":
    main()
