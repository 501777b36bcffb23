# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel of kdtree_build_tree, run on the CPU by an emulator (emulator/emulator.h), against the oracle."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent / "kdtree"))
from test_tree import assert_equals_oracle, random_case  # noqa: E402

OUTPUTS = ("tokens", "parents", "depths", "ranks", "tree_mask", "next_token", "next_sibling", "counts")
SIZES = ("batch", "positions", "top_k", "width", "words")


class Params(ctypes.Structure):
    """BuildParams of tree_params.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("log_probs", "token_ids", "roots")),
        ("spine", ctypes.c_bool),
        ("min_log_prob", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in OUTPUTS),
        *((name, ctypes.c_int32) for name in SIZES),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("emulator") / "emulate_tree.so"
    folders = ROOT / "sgl-kernel" / "csrc" / "speculative", ROOT / "kdtree" / "include", HERE / "emulator"
    # fmt: off
    subprocess.run(["c++", "-std=c++20", "-O2", "-shared", "-fPIC", *(f"-I{folder}" for folder in folders),
                    str(HERE / "emulator" / "emulate_tree.cpp"), "-o", str(path)], check=True)
    # fmt: on
    loaded = ctypes.CDLL(str(path))
    loaded.run_build_tree.restype = ctypes.c_char_p
    loaded.run_build_tree.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    return loaded


@pytest.mark.parametrize("seed", [1, None])
def test_equals_oracle_on_random_cases(library: ctypes.CDLL, seed: int | None) -> None:
    seed = int(np.random.default_rng().integers(2**31)) if seed is None else seed
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for i in range(300):
        case = random_case(rng)
        width, batch = case["width"], 2
        words = (width + 31) // 32
        out = {n: torch.full((batch, width), -77) for n in ("tokens", "next_token", "next_sibling")}
        out |= {n: torch.full((batch, width), -77, dtype=torch.int32) for n in ("parents", "depths", "ranks")}
        out |= {n: torch.full(s, -77, dtype=torch.int32) for n, s in [("tree_mask", (batch * width, words))]}
        out["counts"] = torch.full((batch,), -77, dtype=torch.int32)
        log_probs, token_ids = (torch.from_numpy(case[n]).repeat(batch, 1, 1) for n in ("log_probs", "token_ids"))
        roots = torch.full((batch,), case["root"])
        inputs = {"log_probs": log_probs, "token_ids": token_ids, "roots": roots}
        pointers = {name: tensor.data_ptr() for name, tensor in (inputs | out).items()}
        sizes = dict(zip(SIZES, (batch, *log_probs.shape[1:], width, words), strict=True))
        params = Params(**pointers, spine=case["spine"], min_log_prob=case["min_log_prob"], **sizes)
        assert library.run_build_tree(ctypes.byref(params), i) is None
        for request in range(batch):
            assert_equals_oracle(case, out, request)
