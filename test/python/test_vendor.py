# SPDX-License-Identifier: Apache-2.0
"""Vendoring, on wheels of a few files. (The real ones were laid out by `make vendor` before this test could run.)"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from server import ROOT


@pytest.fixture
def vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """python/vendor.py at work in an empty repository."""
    spec = importlib.util.spec_from_file_location("vendor", ROOT / "python" / "vendor.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "LOCK", tmp_path / "python" / "upstream.lock")
    monkeypatch.setattr(module, "CACHE", tmp_path / ".cache" / "wheels")
    monkeypatch.setattr(sys, "argv", ["vendor.py"])
    (tmp_path / "python").mkdir()
    module.CACHE.mkdir(parents=True)
    lock_wheel(module, "1.0")
    return module


def lock_wheel(vendor: ModuleType, version: str, abi: str | None = None) -> Path:
    """Put a wheel of that version into the cache and name it in the lock."""
    path = vendor.CACHE / f"sglang-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("sglang/__init__.py", f"version = {version!r}\n")
        archive.writestr(f"sglang/only_in_{version.replace('.', '_')}.py", "")
        archive.writestr(f"sglang-{version}.dist-info/METADATA", f"Version: {version}\n")
        archive.writestr(f"sglang-{version}.dist-info/licenses/LICENSE", "Apache\n")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    vendor.LOCK.write_text(
        f'[sglang]\nversion = "{version}"\npackage = "sglang"\ntree = "python"\n'
        f'[sglang.wheels.{abi or vendor.running_abi()}]\nfile = "{path.name}"\nsha256 = "{digest}"\n'
    )
    return path


def laid_files(vendor: ModuleType) -> set[str]:
    return {p.name for p in (vendor.ROOT / "python" / "sglang").iterdir()}


def test_lays_out_the_tree_and_keeps_the_licence(vendor: ModuleType) -> None:
    vendor.main()
    assert laid_files(vendor) == {"__init__.py", "only_in_1_0.py", vendor.STAMP}
    assert (vendor.ROOT / "python" / "sglang.metadata" / "licenses" / "LICENSE").exists()
    assert sorted(p.name for p in (vendor.ROOT / "python").iterdir()) == ["sglang", "sglang.metadata", "upstream.lock"]


def test_second_run_changes_nothing_and_needs_neither_wheel_nor_network(
    vendor: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor.main()
    before = (vendor.ROOT / "python" / "sglang" / "__init__.py").stat()
    for wheel in vendor.CACHE.iterdir():
        wheel.unlink()
    monkeypatch.setattr(vendor.subprocess, "run", lambda *a, **k: pytest.fail("went to the network"))
    vendor.main()
    assert "sglang 1.0 is in place" in capsys.readouterr().out
    assert (vendor.ROOT / "python" / "sglang" / "__init__.py").stat() == before


def test_cached_wheel_is_enough_after_the_tree_is_removed(vendor: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    vendor.main()
    monkeypatch.setattr(sys, "argv", ["vendor.py", "--remove"])
    vendor.main()
    assert not (vendor.ROOT / "python" / "sglang").exists()
    monkeypatch.setattr(sys, "argv", ["vendor.py"])
    monkeypatch.setattr(vendor.subprocess, "run", lambda *a, **k: pytest.fail("went to the network"))
    vendor.main()
    assert "only_in_1_0.py" in laid_files(vendor)


def test_wrong_hash_is_refused_and_lays_nothing_out(vendor: ModuleType) -> None:
    wheel = next(vendor.CACHE.iterdir())
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(SystemExit, match=r"wrong hash: .*sglang-1.0.* has sha256 .* wants .*Delete the file"):
        vendor.main()
    assert not (vendor.ROOT / "python" / "sglang").exists()


@pytest.mark.parametrize("fault", ["a file is missing", "a file was edited", "the stamp is missing"])
def test_half_laid_tree_is_refused_and_left_alone(vendor: ModuleType, fault: str) -> None:
    vendor.main()
    package = vendor.ROOT / "python" / "sglang"
    if fault == "a file is missing":
        (package / "only_in_1_0.py").unlink()
    elif fault == "a file was edited":
        (package / "only_in_1_0.py").write_text("import os\n")
    else:
        (package / vendor.STAMP).unlink()
    before = laid_files(vendor)
    with pytest.raises(SystemExit, match="Run `make clean-vendor`, then `make vendor`"):
        vendor.main()
    assert laid_files(vendor) == before


def test_whole_tree_of_another_version_is_replaced(vendor: ModuleType) -> None:
    vendor.main()
    lock_wheel(vendor, "2.0")
    vendor.main()
    assert laid_files(vendor) == {"__init__.py", "only_in_2_0.py", vendor.STAMP}


def test_python_without_a_locked_wheel_is_told_which_there_are(vendor: ModuleType) -> None:
    lock_wheel(vendor, "1.0", abi="cp39")
    with pytest.raises(SystemExit, match=r"has no sglang wheel for cp3\d+; it has cp39"):
        vendor.main()


def test_wheel_that_pip_cannot_fetch_is_named(vendor: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    next(vendor.CACHE.iterdir()).unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SystemExit, match="pip could not fetch sglang-1"):
        vendor.main()


def test_lock_names_the_pinned_versions_for_both_pythons() -> None:
    lock = tomllib.loads((ROOT / "python" / "upstream.lock").read_text())
    assert lock["sglang"]["version"] == "0.5.23" and set(lock["sglang"]["wheels"]) == {"cp311", "cp312"}
    assert lock["sglang-kernel"]["version"] == "0.4.10"


def test_no_upstream_file_is_tracked() -> None:
    import subprocess

    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert tracked and not [f for f in tracked if f.startswith(("python/sglang/", "sgl-kernel/python/"))]
    sizes = {f: (ROOT / f).stat().st_size for f in tracked if (ROOT / f).exists()}
    assert sum(sizes.values()) < 22e6
    model = sum(size for f, size in sizes.items() if f.startswith("test/models/tiny-mla/"))
    assert 0 < model <= 14e6
