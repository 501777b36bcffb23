# SPDX-License-Identifier: Apache-2.0
"""Is the SGLang that this process runs the locked one, and whole?"""

from __future__ import annotations

import importlib.util
import json
import tomllib
from pathlib import Path
from typing import Any

STAMP = "kdtree-vendored.json"


class VendoredTreeError(RuntimeError):
    """The vendored tree is missing, incomplete or not the locked version."""


def package_path(package: str) -> Path | None:
    """Where `package` would be imported from, without importing it; None if nowhere."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def locked() -> dict[str, Any]:
    """The lock that this extension was made for: beside it in a wheel, one folder up in the repository."""
    here = Path(__file__).parent
    for folder in (here, here.parent):
        lock = folder / "upstream.lock"
        if lock.exists():
            return tomllib.loads(lock.read_text())
    raise VendoredTreeError(f"upstream.lock is neither in {here} nor beside it: reinstall this fork.")


def check() -> None:
    """Raise VendoredTreeError unless the importable sglang and sgl_kernel are what `make vendor` laid out."""
    for name, entry in locked().items():
        package = package_path(entry["package"])
        if package is None:
            raise VendoredTreeError(f"the vendored tree of {name} is missing. Run `make vendor`.")
        if not (package / STAMP).exists():
            raise VendoredTreeError(
                f"{package} was not laid out by `make vendor` (it has no {STAMP}): another {name} is installed. "
                "Uninstall it, or run `make clean-vendor vendor`."
            )
        stamp = json.loads((package / STAMP).read_text())
        hashes = [wheel["sha256"] for wheel in entry["wheels"].values()]
        if stamp["sha256"] not in hashes:
            raise VendoredTreeError(
                f"{package} is stale: it holds {name} {stamp['version']} ({stamp['wheel']}), which upstream.lock does "
                f"not name; it wants {entry['version']}. Run `make vendor`."
            )
        for file, size in stamp["files"].items():
            path = package.parent / file
            if not path.is_file() or path.stat().st_size != size:
                raise VendoredTreeError(
                    f"the vendored tree is incomplete or edited: {path}. Run `make clean-vendor vendor`."
                )
