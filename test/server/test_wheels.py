# SPDX-License-Identifier: Apache-2.0
"""The wheels, installed in a fresh venv, serve."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from conftest import SMALL, assert_greedy, log_lines
from reference import ReferenceModel
from server import ROOT, Server

PROMPT = [0, *range(300, 340)]


def run(*command: str | Path) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist() -> Path:
    """All of dist/, built anew."""
    run(sys.executable, ROOT / "python" / "build_wheels.py")
    return ROOT / "dist"


def wheels_for(dist: Path, python: tuple[int, int]) -> list[Path]:
    abi = f"cp{python[0]}{python[1]}"
    patterns = (f"sglang-*-{abi}-*.whl", "sglang_kernel-*.whl", "kdtree_spec-*.whl")
    return [next(dist.glob(pattern)) for pattern in patterns]


def metadata_of(wheel: Path) -> tuple[email.message.Message, list[str], str]:
    """METADATA, the file names and entry_points.txt of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = next(name for name in names if name.endswith(".dist-info/METADATA")).rsplit("/", 1)[0]
        points = f"{info}/entry_points.txt"
        text = archive.read(points).decode() if points in names else ""
        return email.message_from_bytes(archive.read(f"{info}/METADATA")), names, text


@pytest.mark.parametrize("python", [(3, 11), (3, 12)])
def test_sglang_wheel_is_the_fork(dist: Path, python: tuple[int, int]) -> None:
    metadata, names, entry_points = metadata_of(wheels_for(dist, python)[0])
    assert (metadata["Name"], metadata["Version"]) == ("sglang", "0.5.23+kdtree.1")
    assert {"sglang-kernel==0.4.10+kdtree.1", "kdtree-spec==0.1.0"} <= set(metadata.get_all("Requires-Dist"))
    assert "sglang-kdtree = sglang_kdtree.cli:main" in entry_points
    assert "kdtree = sglang_kdtree.plugin:register" in entry_points
    assert "sglang = sglang.cli.main:main" in entry_points
    for file in ("sglang/launch_server.py", "sglang_kdtree/attention/backend.py", "sglang_kdtree/upstream.lock"):
        assert file in names
    assert any(n.endswith("licenses/LICENSE") for n in names) and any(n.endswith("licenses/NOTICE") for n in names)


def test_kernel_wheel_has_the_library_and_no_cuda(dist: Path) -> None:
    metadata, names, _ = metadata_of(wheels_for(dist, (3, 11))[1])
    assert (metadata["Name"], metadata["Version"]) == ("sglang-kernel", "0.4.10+kdtree.1")
    assert [n for n in names if n.endswith(".so")] == ["sgl_kernel/common_ops.abi3.so"]
    assert "torch==2.14.1" in metadata.get_all("Requires-Dist")


@pytest.mark.long
def test_cuda_kernel_wheel_is_upstreams_with_the_libraries() -> None:
    run(sys.executable, ROOT / "python" / "build_wheels.py", "--cuda")
    metadata, names, _ = metadata_of(next((ROOT / "dist" / "cuda").glob("*.whl")))
    assert (metadata["Name"], metadata["Version"]) == ("sglang-kernel", "0.4.10+kdtree.1")
    assert "torch==2.14.1" in metadata.get_all("Requires-Dist")
    upstreams = next((ROOT / ".cache" / "wheels").glob("sglang_kernel-*.whl"))
    with zipfile.ZipFile(upstreams) as archive:
        theirs = {n for n in archive.namelist() if ".dist-info/" not in n}
    ours = {"sgl_kernel/common_ops.abi3.so", "sgl_kernel/kdtree_cuda.so", "sgl_kernel/kdtree-vendored.json"}
    assert {n for n in names if ".dist-info/" not in n} == theirs | ours


def serve_from(venv: Path, log: Path, reference: ReferenceModel) -> None:
    python = venv / "bin" / "python"
    shown = run(python, "-m", "pip", "show", "sglang", "sglang-kernel")
    assert "Version: 0.5.23+kdtree.1" in shown and "Version: 0.4.10+kdtree.1" in shown
    places = run(python, "-c", "import sglang, sgl_kernel, sglang_kdtree as k; print(sglang, sgl_kernel, k)")
    assert places.count(str(venv)) == 3
    assert "against the oracle" in run(venv / "bin" / "sglang-kdtree", "doctor")
    with Server(log, *SMALL, python=str(venv / "bin" / "sglang"), launch=("serve",)) as server:
        assert_greedy(reference, PROMPT, server.generate(PROMPT, 32, ignore_eos=True)["output_ids"])
        assert len(log_lines(log, "kdtree_mla: rank=0/1")) == 1


def test_wheels_serve_in_a_fresh_venv(dist: Path, tmp_path: Path, reference: ReferenceModel) -> None:
    """The third-party packages are this venv's, by path: its own fork is editable, so it does not come along."""
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", venv)
    site = run(venv / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    Path(site, "third_party.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    run(
        venv / "bin" / "python",
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--ignore-installed",
        *wheels_for(dist, sys.version_info[:2]),
    )
    serve_from(venv, tmp_path / "log", reference)


@pytest.mark.long
@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_wheels_serve_with_their_own_packages(
    dist: Path, tmp_path: Path, reference: ReferenceModel, version: str
) -> None:
    """Everything installed from the lock, as a user does it."""
    python = sys.executable if sys.version.startswith(f"{version}.") else shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "--version"], capture_output=True).returncode != 0:
        pytest.skip(f"no CPython {version} on this machine")
    venv = tmp_path / "venv"
    run(python, "-m", "venv", venv)
    pip = (venv / "bin" / "python", "-m", "pip", "install", "-q", "--no-deps")
    run(*pip, "-r", ROOT / "python" / "requirements-cpu.txt")
    run(*pip, *wheels_for(dist, tuple(int(part) for part in version.split("."))))
    serve_from(venv, tmp_path / "log", reference)
