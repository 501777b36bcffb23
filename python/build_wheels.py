# SPDX-License-Identifier: Apache-2.0
"""Build the fork's wheels into dist/. What `make wheel` runs.

    sglang          for CPython 3.11 and 3.12: upstream's wheel, the extension, our entry point and version
    sglang-kernel   CPU flavour: upstream's Python files with the library that `make kernels` built
    kdtree-spec     pure Python

With --cuda (`make wheel-cuda`) only dist/cuda/, which takes a minute:

    sglang-kernel   CUDA flavour: all of upstream's wheel with both libraries that `make kernels` built

Upstream's wheels are compiled per Python, so they are repacked, not rebuilt: each is unpacked, our files are added, its
metadata is rewritten from the pyproject.toml beside the sources, and `wheel pack` makes the new RECORD.
"""

from __future__ import annotations

import argparse
import configparser
import email
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import torch
import vendor

ROOT = vendor.ROOT
DIST = ROOT / "dist"
PACKAGE = ROOT / "sgl-kernel" / "python" / "sgl_kernel"
LIBRARIES = {"cpu": ["common_ops.abi3.so"], "cuda": ["common_ops.abi3.so", "kdtree_cuda.so"]}
PLATFORM_TAG = "cp310-abi3-linux_x86_64"  # of the kernel wheel: the library keeps to the limited API


def project(folder: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]


def unpack(wheel: Path, into: Path) -> Path:
    """Extract a wheel; its .dist-info."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(into)
    return next(into.glob("*.dist-info"))


def rewrite_metadata(info: Path, settings: dict[str, Any], requires: list[str]) -> Path:
    """Give the .dist-info our version, description and entry points, and set requirements: those named in `requires`
    replace upstream's of the same distribution. Returns its new place."""
    metadata = email.message_from_string((info / "METADATA").read_text())
    metadata.replace_header("Version", settings["version"])
    metadata.replace_header("Summary", settings["description"])
    replaced = {line.split("==")[0] for line in requires}
    kept = [line for line in metadata.get_all("Requires-Dist", []) if line.split("==")[0].strip() not in replaced]
    del metadata["Requires-Dist"]
    for line in requires + kept:
        metadata["Requires-Dist"] = line
    (info / "METADATA").write_text(metadata.as_string())

    if "scripts" in settings:
        entry_points = configparser.ConfigParser(delimiters=("=",))
        entry_points.optionxform = str  # names are case-sensitive
        entry_points.read_dict({"console_scripts": settings["scripts"]} | settings["entry-points"])
        with (info / "entry_points.txt").open("w") as f:
            entry_points.write(f)

    shutil.copy(ROOT / "NOTICE", info / "licenses" / "NOTICE")
    (info / "RECORD").unlink()
    return info.rename(info.with_name(f"{settings['name'].replace('-', '_')}-{settings['version']}.dist-info"))


def pack(tree: Path, into: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "wheel", "pack", str(tree), "-d", str(into)], check=True, stdout=subprocess.DEVNULL
    )


def build_sglang(entry: dict[str, Any], abi: str) -> None:
    wheel = vendor.locked_wheel("sglang", entry, abi)
    needed = [f"{p['name']}=={p['version']}" for p in (project("sgl-kernel"), project("kdtree"))]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        info = unpack(vendor.fetch("sglang", entry, abi), tree)
        vendor.write_stamp(tree / "sglang", "sglang", entry, wheel)
        ours = tree / "sglang_kdtree"
        shutil.copytree(ROOT / "python" / "sglang_kdtree", ours, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(vendor.LOCK, ours / vendor.LOCK.name)
        rewrite_metadata(info, project("python"), needed)
        pack(tree, DIST)


def build_kernel(entry: dict[str, Any], flavour: str, into: Path) -> None:
    libraries = [PACKAGE / name for name in LIBRARIES[flavour]]
    for library in libraries:
        if not library.exists():
            sys.exit(f"wheel: {library} is not there. Run `make kernels`.")
    wheel = vendor.locked_wheel("sglang-kernel", entry, "abi3")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        info = unpack(vendor.fetch("sglang-kernel", entry, "abi3"), tree)
        if flavour == "cpu":
            # CUDA libraries, and packages of CUDA kernels that nothing on a CPU imports.
            for library in tree.rglob("*.so"):
                library.unlink()
            shutil.rmtree(tree / "triton_kernels", ignore_errors=True)
        vendor.write_stamp(tree / "sgl_kernel", "sglang-kernel", entry, wheel)
        for library in libraries:
            shutil.copy(library, tree / "sgl_kernel")
        torch_pin = f"torch=={torch.__version__.split('+')[0]}"  # the CPU library is linked against this one
        info = rewrite_metadata(info, project("sgl-kernel"), [torch_pin])
        tags = email.message_from_string((info / "WHEEL").read_text())
        del tags["Tag"]
        tags["Tag"] = PLATFORM_TAG
        (info / "WHEEL").write_text(tags.as_string())
        pack(tree, into)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", action="store_true", help="the CUDA flavour of sglang-kernel, into dist/cuda/")
    cuda = parser.parse_args().cuda
    lock = tomllib.loads(vendor.LOCK.read_text())
    into = DIST / "cuda" if cuda else DIST
    for old in into.glob("*.whl"):
        old.unlink()
    into.mkdir(parents=True, exist_ok=True)
    try:
        if not cuda:
            for abi in lock["sglang"]["wheels"]:
                build_sglang(lock["sglang"], abi)
        build_kernel(lock["sglang-kernel"], "cuda" if cuda else "cpu", into)
    except vendor.VendorError as error:
        sys.exit(f"wheel: {error}")
    if not cuda:
        # fmt: off
        subprocess.run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(DIST),
                        str(ROOT / "kdtree")], check=True, stdout=subprocess.DEVNULL)
        # fmt: on
    for wheel in sorted(into.glob("*.whl")):
        print(f"wheel: {wheel.relative_to(ROOT)} ({wheel.stat().st_size / 2**20:.1f} MiB)")


if __name__ == "__main__":
    main()
