# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels of kdtree_mla_verify, run on the CPU by an emulator (emulator/emulator.h), against the oracle.

It is the kernels' own source with mma, ldmatrix, cp.async and barriers emulated thread by thread, in a random order of
warps: layouts, masks, the schedule, the merge of splits and missing barriers are tested without a GPU. What only the
hardware can show, test_mla_verify_cuda.py tests.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_spec import oracle
from problems import Inputs, compare, make, packed_mask

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent.parent / "sgl-kernel" / "csrc" / "attention" / "kdtree_mla"
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3}

Run = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Params(ctypes.Structure):
    """VerifyParams of params.h."""

    # fmt: off
    _fields_ = [
        ("q", ctypes.c_void_p), ("q_token_stride", ctypes.c_int64), ("q_head_stride", ctypes.c_int64),
        ("kv", ctypes.c_void_p), ("kv_stride_bytes", ctypes.c_int64),
        ("slot_table", ctypes.c_void_p), ("slot_table_stride", ctypes.c_int64), ("table_rows", ctypes.c_void_p),
        ("page", ctypes.c_int32), ("prefix_lens", ctypes.c_void_p), ("prefix_lens_are_64_bit", ctypes.c_bool),
        ("tree_mask", ctypes.c_void_p), ("mask_words", ctypes.c_int32),
        ("scale_log2", ctypes.c_float), ("k_scale", ctypes.c_float), ("out", ctypes.c_void_p), ("lse", ctypes.c_void_p),
        ("batch", ctypes.c_int32), ("width", ctypes.c_int32), ("heads", ctypes.c_int32), ("rows", ctypes.c_int32),
        ("row_blocks", ctypes.c_int32), ("groups", ctypes.c_int32),
        ("partial_out", ctypes.c_void_p), ("partial_sum", ctypes.c_void_p), ("partial_peak", ctypes.c_void_p),
    ]
    # fmt: on


def build(folder: Path, kernels: Path = KERNELS) -> ctypes.CDLL:
    library = folder / "emulate.so"
    # fmt: off
    subprocess.run(["c++", "-std=c++20", "-O2", "-shared", "-fPIC", f"-I{kernels}", f"-I{HERE / 'emulator'}",
                    str(HERE / "emulator" / "emulate.cpp"), "-o", str(library)], check=True)
    # fmt: on
    loaded = ctypes.CDLL(str(library))
    loaded.workspace_bytes.restype = ctypes.c_int64
    loaded.workspace_bytes.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    loaded.run_verify.restype = ctypes.c_char_p
    # fmt: off
    loaded.run_verify.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64]
    # fmt: on
    return loaded


def make_run(library: ctypes.CDLL) -> Run:
    def run(x: Inputs, blocks: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse, written over poison, on a device that runs `blocks` blocks at a time."""
        batch, heads = len(x.table_rows), x.q.shape[1]
        width = len(x.q) // batch
        workspace = np.full(library.workspace_bytes(heads, width, blocks) // 4 + 4, np.nan, np.float32)
        out = torch.full((*x.q.shape[:2], 512), float("nan"), dtype=x.q.dtype)
        lse = torch.full(x.q.shape[:2], float("nan"))
        mask = packed_mask(x)
        params = Params(
            q=x.q.data_ptr(),
            q_token_stride=x.q.stride(0),
            q_head_stride=x.q.stride(1),
            kv=x.kv_cache.data_ptr(),
            kv_stride_bytes=x.kv_cache.stride(0) * 2,
            slot_table=x.slot_table.data_ptr(),
            slot_table_stride=x.slot_table.stride(0),
            table_rows=x.table_rows.data_ptr(),
            page=x.page,
            prefix_lens=x.prefix_lens.data_ptr(),
            prefix_lens_are_64_bit=x.prefix_lens.dtype == torch.int64,
            tree_mask=None if mask is None else mask.data_ptr(),
            mask_words=0 if mask is None else mask.shape[1],
            scale_log2=x.sm_scale * x.k_scale * 1.4426950408889634,
            k_scale=x.k_scale,
            out=out.data_ptr(),
            lse=lse.data_ptr(),
            batch=batch,
            width=width,
            heads=heads,
        )
        half = int(x.q.dtype == torch.float16)
        error = library.run_verify(ctypes.byref(params), half, blocks, workspace.ctypes.data, seed)
        if error:
            raise RuntimeError(error.decode())
        return out, lse

    return run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(build(tmp_path_factory.mktemp("emulator")))


def check(run: Run, x: Inputs, blocks: int = 4, seed: int = 0) -> None:
    compare(x, *run(x, blocks, seed), TOLERANCE[x.q.dtype])


dtypes = st.sampled_from(list(TOLERANCE))


@settings(max_examples=40, deadline=None)
@given(
    heads=st.integers(1, 20),
    width=st.integers(1, 12),
    prefixes=st.lists(st.integers(0, 200), min_size=1, max_size=5).map(tuple),
    dtype=dtypes,
    page=st.sampled_from([1, 16, 64]),
    chain=st.booleans(),
    blocks=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_oracle_on_random_shapes(
    run: Run,
    heads: int,
    width: int,
    prefixes: tuple[int, ...],
    dtype: torch.dtype,
    page: int,
    chain: bool,
    blocks: int,
    seed: int,
) -> None:
    check(run, make(heads, width, prefixes, dtype, page, chain, seed), blocks, seed)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "width", "prefixes", "blocks"),
    [
        (1, 1, (0,), 4),  # nothing but the token itself
        (1, 1, (14, 15, 16, 17), 2),  # around a tile's end
        (16, 1, (700,), 20),  # decode, many splits
        (128, 1, (100,), 5),
        (8, 4, (63, 64, 65), 5),  # exactly one small tile of rows
        (11, 3, (40, 0), 3),  # one row more than the small tile has
        (8, 16, (530,), 40),  # more splits than the merge's warps
        (1, 256, (10,), 4),
        (5, 33, (40, 0, 7), 7),
        (2, 5, (900, 1, 0, 300), 6),  # uneven requests: a share holds the end of one and the start of the next
        (4, 2, tuple(range(0, 70)), 9),  # more requests than a warp has lanes
    ],
)
def test_equals_oracle_at_edges(
    run: Run, heads: int, width: int, prefixes: tuple[int, ...], blocks: int, dtype: torch.dtype
) -> None:
    check(run, make(heads, width, prefixes, dtype), blocks)
    check(run, make(heads, width, prefixes, dtype, chain=True), blocks, seed=1)


@pytest.mark.parametrize("shape", ["star", "deep chain", "siblings of a chain"])
def test_tree_shapes(run: Run, shape: str) -> None:
    width = 67
    parents = {
        "star": [-1] + [0] * (width - 1),
        "deep chain": list(range(-1, width - 1)),
        "siblings of a chain": [-1] + [max(0, (i - 1) // 2 * 2) for i in range(1, width)],
    }[shape]
    x = make(heads=1, width=width, prefixes=(50, 0), dtype=torch.bfloat16)
    check(run, replace(x, mask=np.tile(oracle.ancestor_mask(parents), (2, 1))))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_zero_queries_and_keys_give_the_mean_of_the_visible_values(run: Run, dtype: torch.dtype) -> None:
    """Random scores hide a mask that is ignored; equal weights do not."""
    x = make(heads=2, width=9, prefixes=(5, 0), dtype=dtype)
    x.q.zero_()
    for b, prefix in enumerate((5, 0)):
        row = x.slot_table[x.table_rows[b]]
        x.kv_cache[row[: prefix + 9].long(), 0, :512] = torch.arange(prefix + 9).to(dtype)[:, None]
    out, lse = run(x)
    for b, prefix in enumerate((5, 0)):
        for i in range(9):
            seen = list(range(prefix)) + [prefix + j for j in np.flatnonzero(x.mask[b * 9 + i])]
            mean = torch.tensor(seen).double().mean()
            torch.testing.assert_close(out[b * 9 + i].double(), mean.expand(2, 512), rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(lse[b * 9 + i], torch.full((2,), float(np.log(len(seen)))))


def test_scores_that_grow_and_fall_along_the_keys(run: Run) -> None:
    """The running peak moves by less and by more than the slack, up and down; far from zero too."""
    for seed, scales in enumerate([(1, 3, 30, 2, 90), (90, 1, 1, 1, 1), (-40, -30, -20, -10, 200)]):
        x = make(heads=4, width=8, prefixes=(320,), dtype=torch.bfloat16, seed=seed)
        direction = torch.randn(576)
        x.q[:] = direction + 0.1 * torch.randn(8, 4, 576)
        for part, scale in enumerate(scales):
            slots = x.slot_table[x.table_rows[0], part * 64 : part * 64 + 64].long()
            x.kv_cache[slots, 0] = (x.kv_cache[slots, 0] + scale * 0.02 * direction).to(torch.bfloat16)
        check(run, x, blocks=1)
        check(run, x, blocks=7)


def test_row_that_sees_nothing_gives_zero_and_minus_infinity(run: Run) -> None:
    x = make(width=5, prefixes=(0, 30), dtype=torch.bfloat16)
    x.mask[2] = False  # request 0 has no prefix, so node 2 sees nothing; its neighbours are as before
    out, lse = run(x)
    assert (out[2] == 0).all() and torch.isneginf(lse[2]).all()
    check(run, x)


@pytest.mark.parametrize("prefixes", [(40, -1, 17), (-1, -1, 5), (5, -1, -1), (-1, -1, -1)])
def test_absent_requests_give_zero_and_leave_the_others_alone(run: Run, prefixes: tuple[int, ...]) -> None:
    x = make(width=3, prefixes=tuple(max(p, 0) for p in prefixes), dtype=torch.bfloat16)
    x.prefix_lens[:] = torch.tensor(prefixes)
    out, lse = run(x)
    for b, prefix in enumerate(prefixes):
        if prefix < 0:
            assert (out[b * 3 : b * 3 + 3] == 0).all() and torch.isneginf(lse[b * 3 : b * 3 + 3]).all()
    check(run, x)


def test_same_bits_in_any_order_of_warps(run: Run) -> None:
    """A missing barrier would show here and not in the errors: late data are often nearly right."""
    for shape in ({"heads": 8, "width": 16, "prefixes": (300, 33)}, {"heads": 16, "width": 1, "prefixes": (500, 7)}):
        x = make(dtype=torch.bfloat16, **shape)
        out, lse = run(x, blocks=3, seed=0)
        for seed in range(1, 5):
            again = run(x, blocks=3, seed=seed)
            assert torch.equal(again[0], out) and torch.equal(again[1], lse)


def test_rows_outside_the_request_are_not_read(run: Run) -> None:
    """NaN in every slot that no request owns."""
    x = make(heads=2, width=5, prefixes=(20, 0), dtype=torch.bfloat16)
    owned = torch.cat([x.slot_table[r, : p + 5] for r, p in zip(x.table_rows, (20, 0), strict=True)]).long()
    clean = x.kv_cache[owned].clone()
    x.kv_cache.fill_(float("nan"))
    x.kv_cache[owned] = clean
    out, lse = run(x)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()


def test_query_may_be_strided_lengths_32_bit_and_keys_scaled(run: Run) -> None:
    x = make(heads=6, width=7, dtype=torch.bfloat16)
    wide = torch.randn(14, 12, 600).to(torch.bfloat16)
    check(run, replace(x, q=wide[:, ::2, 10:586], prefix_lens=x.prefix_lens.int(), k_scale=0.5))


def test_slots_beyond_two_gigabytes(run: Run) -> None:
    """A slot times the row's bytes does not fit 32 bits: same result as in low slots."""
    x = make(heads=2, width=4, prefixes=(6,), dtype=torch.bfloat16)
    rows = 2**32 // (576 * 2) + 100
    # Untouched pages of the large cache cost no memory.
    cache = torch.empty(rows, 1, 576, dtype=torch.bfloat16)
    table = x.slot_table.clone()
    used = x.slot_table[x.table_rows[0], :10]
    far = torch.arange(10, dtype=torch.int32) * 7 + rows - 80
    cache[far.long()] = x.kv_cache[used.long()]
    table[x.table_rows[0], :10] = far
    assert torch.equal(run(replace(x, kv_cache=cache, slot_table=table))[0], run(x)[0])


@pytest.mark.parametrize(
    ("file", "line", "without"),
    [
        ("verify_kernel.cuh", "const bool any = barrier_or(must_rescale);", "const bool any = true;"),
        ("verify_kernel.cuh", "barrier(1 + row_group, kDepthWarps * 32);", ""),
        ("verify_kernel.cuh", "wait_copies<kStages - 3>();", "wait_copies<kStages - 1>();"),
        ("verify_kernel.cuh", "barrier();  // also: nobody reads this segment's keys any more", ""),
        ("combine_kernel.cuh", "    barrier();\n", ""),
    ],
)
def test_the_emulator_sees_a_missing_barrier(tmp_path: Path, file: str, line: str, without: str) -> None:
    """Each of the kernels' barriers, taken out: what the other tests assert must then fail."""
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    for source in KERNELS.iterdir():
        text = source.read_text()
        if source.name == file:
            assert text.count(line) == 1
            text = text.replace(line, without)
        (kernels / source.name).write_text(text)
    run = make_run(build(tmp_path, kernels))
    with pytest.raises((AssertionError, RuntimeError)):
        for seed in range(20):
            check(run, make(heads=16, width=3, prefixes=(400, 20, 90), dtype=torch.bfloat16), blocks=40, seed=seed)
