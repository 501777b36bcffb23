"""Lay out the locked upstream wheels as git-ignored source trees.

    python python/vendor.py                what `make vendor` runs: fetch, check, lay out
    python python/vendor.py --fetch ABI    fetch and check only, for another CPython ABI
    python python/vendor.py --remove       remove the trees (what `make clean-vendor` runs)

The lock is `python/upstream.lock`. Wheels are kept in `.cache/wheels`, so the second run works offline.
A tree is complete or absent: it is built beside its place, then renamed. A tree that is there but does
not match its own RECORD is refused, never repaired, because someone may have edited it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "python" / "upstream.lock"
CACHE = ROOT / ".cache" / "wheels"
STAMP = "kdtree-vendored.json"


class VendorError(RuntimeError):
    """Vendoring can't go on; the message says what to do."""


def running_abi() -> str:
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def locked_wheel(name: str, entry: dict[str, Any], abi: str) -> dict[str, str]:
    """The lock's wheel of distribution `name` for CPython `abi` ({"file", "sha256"})."""
    wheels = entry["wheels"]
    if abi in wheels:
        return wheels[abi]
    if "abi3" in wheels:
        return wheels["abi3"]
    raise VendorError(f"{LOCK.name} has no {name} wheel for {abi}; it has {', '.join(wheels)}. Use one of these.")


def sha256_of(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def fetch(name: str, entry: dict[str, Any], abi: str) -> Path:
    """The checked wheel in the cache, downloaded with pip by its exact version if it is not there."""
    wheel = locked_wheel(name, entry, abi)
    path = CACHE / wheel["file"]
    if not path.exists():
        print(f"vendor: fetching {wheel['file']}", flush=True)
        CACHE.mkdir(parents=True, exist_ok=True)
        platform = wheel["file"].removesuffix(".whl").rsplit("-", 1)[1]
        # fmt: off
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
                   "--implementation", "cp", "--python-version", f"{abi[2]}.{abi[3:]}", "--platform", platform,
                   "--dest", str(CACHE), f"{name}=={entry['version']}"]
        # fmt: on
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0 or not path.exists():
            raise VendorError(f"pip could not fetch {wheel['file']}:\n{done.stderr.strip()}")
    found = sha256_of(path)
    if found != wheel["sha256"]:
        raise VendorError(
            f"wrong hash: {path} has sha256 {found}, {LOCK.name} wants {wheel['sha256']}. "
            "Delete the file and run `make vendor` again; if it comes back, do not trust the registry's file."
        )
    return path


def tree_fault(package: Path) -> str | None:
    """What is wrong with a laid-out package against its stamp, or None."""
    stamp = package / STAMP
    if not stamp.exists():
        return f"{package} has no {STAMP}: half laid, or not laid out by `make vendor`"
    for file, size in json.loads(stamp.read_text())["files"].items():
        path = package.parent / file
        if not path.is_file() or path.stat().st_size != size:
            return f"{path} is missing or not the size that was laid out"
    return None


def write_stamp(package: Path, name: str, entry: dict[str, Any], wheel: dict[str, str]) -> int:
    """Record in the package which wheel it came from and which files it has, with their sizes; how many there are."""
    root = package.parent
    files = {str(f.relative_to(root)): f.stat().st_size for f in sorted(package.rglob("*")) if f.is_file()}
    stamp = {"name": name, "version": entry["version"], "wheel": wheel["file"], "sha256": wheel["sha256"]}
    (package / STAMP).write_text(json.dumps(stamp | {"files": files}))
    return len(files)


def lay_out(name: str, entry: dict[str, Any]) -> None:
    wheel = locked_wheel(name, entry, running_abi())
    place = ROOT / entry["tree"]
    package = place / entry["package"]
    info = place / f"{entry['package']}.metadata"
    if package.exists():
        fault = tree_fault(package)
        if fault:
            raise VendorError(f"{fault}. Run `make clean-vendor`, then `make vendor`.")
        if json.loads((package / STAMP).read_text())["sha256"] == wheel["sha256"]:
            print(f"vendor: {name} {entry['version']} is in place")
            return
    path = fetch(name, entry, running_abi())
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".vendor-", dir=place) as scratch:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(scratch)
        laid = Path(scratch) / entry["package"]
        count = write_stamp(laid, name, entry, wheel)
        # Licence and metadata, under a name that no importer takes for an installed distribution.
        metadata = next(Path(scratch).glob("*.dist-info"))
        for target in (package, info):
            shutil.rmtree(target, ignore_errors=True)
        metadata.rename(info)
        laid.rename(package)
    print(f"vendor: {name} {entry['version']} laid out in {package.relative_to(ROOT)} ({count} files)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Lay out the locked upstream wheels.")
    parser.add_argument("--fetch", metavar="ABI", help="only fetch and check the wheels of this ABI, such as cp312")
    parser.add_argument("--remove", action="store_true", help="remove the laid-out trees")
    args = parser.parse_args()
    lock = tomllib.loads(LOCK.read_text())
    try:
        for name, entry in lock.items():
            if args.remove:
                for suffix in ("", ".metadata"):
                    shutil.rmtree(ROOT / entry["tree"] / (entry["package"] + suffix), ignore_errors=True)
            elif args.fetch:
                fetch(name, entry, args.fetch)
            else:
                lay_out(name, entry)
    except VendorError as error:
        sys.exit(f"vendor: {error}")


if __name__ == "__main__":
    main()
