# SPDX-License-Identifier: Apache-2.0
"""What the built CUDA kernels take of an sm_120 GPU, read from the machine code that ships.

    python sgl-kernel/kernel_resources.py [--arch sm_120a] [--json FILE]

Registers, stack and local memory come from the ELF that the compiler wrote, instructions from its disassembly. For
sm_120a it ends with an error unless every verify kernel keeps within the block's limits: no spill, 101,376 bytes of
shared memory, 8 warps an SM, tensor core and asynchronous copy instructions.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

LIBRARY = Path(__file__).resolve().parent / "python" / "sgl_kernel" / "kdtree_cuda.so"
SM_120_SHARED = 101_376  # bytes a block (CUDA C programming guide, compute capability 12.0)
SM_REGISTERS = 65_536
BLOCK_THREADS = 256
RESERVED_SHARED = 1024  # the system's own, a block; counted in the ELF and not in the block's limit
INSTRUCTIONS = ("HMMA", "LDGSTS", "LDSM", "STL", "LDL")  # tensor core, async copy, ldmatrix, spill stores and loads


@dataclass
class Kernel:
    """One compiled kernel. shared: bytes of a block, static and dynamic; instructions: how many of each kind."""

    name: str
    type: str
    parameters: tuple[int, ...]
    registers: int
    stack: int
    local: int
    shared: int
    instructions: dict[str, int]

    @property
    def warps_an_sm(self) -> int:
        """By registers, which are given out in eights, and by shared memory."""
        by_registers = SM_REGISTERS // (-(-self.registers // 8) * 8 * BLOCK_THREADS)
        by_shared = (SM_120_SHARED + RESERVED_SHARED) // (self.shared + RESERVED_SHARED)
        return min(by_registers, by_shared) * BLOCK_THREADS // 32

    def faults(self) -> list[str]:
        """Why this kernel is not fit for sm_120; empty if it is."""
        spills = self.instructions["STL"] + self.instructions["LDL"]
        checks = {
            f"spills: {self.stack} bytes of stack, {self.local} local, {spills} instructions": self.stack == 0
            and self.local == 0
            and spills == 0,
            f"{self.shared} bytes of shared memory, over {SM_120_SHARED}": self.shared <= SM_120_SHARED,
            f"{self.warps_an_sm} warps an SM, below 8": self.warps_an_sm >= 8,
        }
        if self.name == "verify_kernel":
            checks["no tensor core instruction (HMMA)"] = self.instructions["HMMA"] > 0
            checks["no asynchronous copy (LDGSTS)"] = self.instructions["LDGSTS"] > 0
        return [fault for fault, fine in checks.items() if not fine]


def disassembler() -> Path:
    """cuobjdump, which Triton's wheel brings."""
    spec = importlib.util.find_spec("triton")
    tool = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump" if spec and spec.origin else None
    if tool is None or not tool.exists():
        sys.exit("kernel_resources: cuobjdump is not there; it comes with the locked triton. Run `make install`.")
    return tool


def dump(arch: str, *what: str) -> str:
    command = [str(disassembler()), "-arch", arch, *what, str(LIBRARY)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@functools.cache
def dynamic_shared_bytes() -> tuple[int, int]:
    """What the host asks for, for the small and for the large tile. In a process of its own: the library defines an op
    that the CPU library defines too."""
    code = (
        f"import torch; torch.ops.load_library({str(LIBRARY)!r}); plan = torch.ops.sgl_kernel.kdtree_mla_plan; "
        "print(plan(1, 1, 1, 1)[5], plan(128, 256, 1, 1)[5])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    small, large = done.stdout.split()
    return int(small), int(large)


def shared_bytes(name: str, parameters: tuple[int, ...]) -> int:
    """Dynamic shared memory of a kernel with these template parameters."""
    if name == "combine_kernel":
        return 8 * 516 * 4 if parameters[0] > 1 else 0
    return dynamic_shared_bytes()[parameters[0] - 1]


def read_kernels(arch: str) -> list[Kernel]:
    """Every attention kernel of the library compiled for `arch`; those of draft trees are left out: they are small."""
    usage = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", dump(arch, "-res-usage"))
    code: dict[str, Counter[str]] = {}
    for function, body in re.findall(r"Function : (\w+)(.*?)(?=Function :|\Z)", dump(arch, "-sass"), re.S):
        code[function] = Counter(re.findall(rf"\b({'|'.join(INSTRUCTIONS)})\b", body))
    kernels = []
    for function, registers, stack, shared, local in usage:
        if re.search(r"kdtree\d+(build_tree|accept|top_k|move_rows)_kernel", function):
            continue
        found = re.search(r"kdtree\d+([a-z]+_kernel)I.*?(bf16|fp16)(.*?)EEv", function)
        assert found, f"unknown kernel {function}"
        parameters = tuple(int(n) for n in re.findall(r"Li(\d+)E", found[3]))
        static = max(0, int(shared) - RESERVED_SHARED)
        kernels.append(
            Kernel(
                found[1],
                found[2],
                parameters,
                int(registers),
                int(stack),
                int(local),
                static + shared_bytes(found[1], parameters),
                {name: code[function][name] for name in INSTRUCTIONS},
            )
        )
    return sorted(kernels, key=lambda k: (k.name, k.type, k.parameters), reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="sm_120a")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kernels = read_kernels(args.arch)
    if not kernels:
        sys.exit(f"kernel_resources: {LIBRARY.name} has no code for {args.arch}")
    print(f"{args.arch}: kernel, type, template parameters")
    print(f"{'':34} {'regs':>4} {'spill B':>7} {'shared B':>8} {'warps/SM':>8} {'HMMA':>5} {'LDGSTS':>6} {'LDSM':>5}")
    for k in kernels:
        name = f"{k.name} {k.type} {','.join(map(str, k.parameters))}"
        numbers = f"{k.registers:4} {k.stack + k.local:7} {k.shared:8} {k.warps_an_sm:8}"
        print(f"{name:34} {numbers} " + " ".join(f"{k.instructions[i]:5}" for i in ("HMMA", "LDGSTS", "LDSM")))
    if args.json:
        args.json.write_text(json.dumps([asdict(k) | {"arch": args.arch} for k in kernels], indent=1) + "\n")
    faults = [f"{k.name} {k.type} {k.parameters}: {fault}" for k in kernels for fault in k.faults()]
    if faults and args.arch == "sm_120a":
        sys.exit("kernel_resources: " + "\n".join(faults))


if __name__ == "__main__":
    main()
