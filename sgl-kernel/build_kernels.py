# SPDX-License-Identifier: Apache-2.0
"""Build the CPU kernel library into the vendored sgl_kernel package. What `make kernels` runs; incremental."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
BUILD = HERE / "build" / "cpu"
PACKAGE = HERE / "python" / "sgl_kernel"


def run(step: str, command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\nkernels: {step} failed (see above)")
    return done.stdout


def main() -> None:
    if not PACKAGE.is_dir():
        sys.exit(f"kernels: {PACKAGE} is not there. Run `make vendor`.")
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").exists():
        sys.exit(f"kernels: {include}/Python.h is not there. Install Python's headers (python3-dev).")
    if shutil.which("c++") is None and shutil.which("g++") is None:
        sys.exit("kernels: no C++ compiler. Install g++ 11 or newer.")
    tools = Path(sys.executable).parent
    # fmt: off
    run("cmake", [str(tools / "cmake"), "-G", "Ninja", "-S", str(HERE), "-B", str(BUILD),
                  f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", f"-DTORCH_DIR={Path(torch.__file__).parent}",
                  f"-DPYTHON_INCLUDE={include}", f"-DOUTPUT_DIR={PACKAGE}"])
    # fmt: on
    output = run("the build", [str(tools / "ninja"), "-C", str(BUILD)])
    built = "up to date" if "no work to do" in output else "built"
    print(f"kernels: {PACKAGE.relative_to(HERE.parent)}/common_ops.abi3.so {built} (CPU, torch {torch.__version__})")


if __name__ == "__main__":
    main()
