# SPDX-License-Identifier: Apache-2.0
"""kdtree_mla_verify against the numpy oracle in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import sgl_kernel  # noqa: F401  (registers torch.ops.sgl_kernel)
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_spec import oracle
from problems import SCALE, Inputs, compare, make, packed_mask

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def run(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The op's out and lse, written over poison."""
    out = torch.full((*x.q.shape[:2], 512), float("nan"), dtype=x.q.dtype)
    lse = torch.full(x.q.shape[:2], float("nan"))
    # fmt: off
    torch.ops.sgl_kernel.kdtree_mla_verify(x.q, x.kv_cache, x.slot_table, x.table_rows, x.page, x.prefix_lens,
                                           packed_mask(x), x.sm_scale, x.k_scale, out, lse, None)
    # fmt: on
    return out, lse


def check(x: Inputs) -> None:
    compare(x, *run(x), TOLERANCE[x.q.dtype])


dtypes = st.sampled_from(list(TOLERANCE))


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 20),
    width=st.integers(1, 40),
    prefixes=st.lists(st.integers(0, 200), min_size=1, max_size=4).map(tuple),
    dtype=dtypes,
    page=st.sampled_from([1, 16, 64]),
    chain=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_oracle_on_random_shapes(
    heads: int, width: int, prefixes: tuple[int, ...], dtype: torch.dtype, page: int, chain: bool, seed: int
) -> None:
    check(make(heads, width, prefixes, dtype, page, chain, seed))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "width", "prefixes"),
    [
        (1, 1, (0,)),  # nothing but the token itself
        (1, 1, (63, 64, 65)),  # around a tile's end
        (4, 1, (1023, 1024, 1535, 1536)),  # around a split's end
        (128, 1, (100,)),
        (8, 33, (40, 0)),
        (2, 256, (10, 700)),
        (128, 256, (5,)),
        (3, 17, (2500, 1, 0, 900)),  # uneven requests in one batch
    ],
)
def test_equals_oracle_at_edges(heads: int, width: int, prefixes: tuple[int, ...], dtype: torch.dtype) -> None:
    check(make(heads, width, prefixes, dtype))
    check(make(heads, width, prefixes, dtype, chain=True))


@pytest.mark.parametrize("shape", ["star", "deep chain", "siblings of a chain"])
def test_tree_shapes(shape: str) -> None:
    width = 33
    parents = {
        "star": [-1] + [0] * (width - 1),
        "deep chain": list(range(-1, width - 1)),
        "siblings of a chain": [-1] + [max(0, (i - 1) // 2 * 2) for i in range(1, width)],
    }[shape]
    x = make(heads=4, width=width, prefixes=(50, 0))
    check(replace(x, mask=np.tile(oracle.ancestor_mask(parents), (2, 1))))


def test_chain_without_mask_equals_chain_with_mask() -> None:
    x = make(width=20, chain=True)
    masked = replace(x, mask=np.tile(np.tri(20, dtype=np.bool_), (2, 1)))
    for a, b in zip(run(x), run(masked), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_zero_queries_and_keys_give_the_mean_of_the_visible_values(dtype: torch.dtype) -> None:
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
            torch.testing.assert_close(
                out[b * 9 + i].double(), mean.expand(2, 512), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
            )
            torch.testing.assert_close(lse[b * 9 + i], torch.full((2,), float(np.log(len(seen)))))


def test_row_that_sees_nothing_gives_zero_and_minus_infinity() -> None:
    x = make(width=5, prefixes=(0, 30))
    x.mask[2] = False  # request 0 has no prefix, so node 2 sees nothing; its neighbours are as before
    out, lse = run(x)
    assert (out[2] == 0).all() and torch.isneginf(lse[2]).all()
    check(x)


def test_padded_request_gives_zero_and_leaves_the_others_alone() -> None:
    x = make(width=3, prefixes=(40, 9, 17))
    alone = run(x)
    x.prefix_lens[1] = -1
    out, lse = run(x)
    assert (out[3:6] == 0).all() and torch.isneginf(lse[3:6]).all()
    for got, before in zip((out, lse), alone, strict=True):
        assert torch.equal(got[:3], before[:3]) and torch.equal(got[6:], before[6:])
    check(x)


def test_empty_batch_is_accepted() -> None:
    x = make()
    empty = replace(x, q=x.q[:0], table_rows=x.table_rows[:0], prefix_lens=x.prefix_lens[:0], mask=None)
    assert run(empty)[0].shape == (0, 4, 512)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_query_may_be_strided(dtype: torch.dtype) -> None:
    x = make(heads=6, width=7, dtype=dtype)
    wide = torch.randn(14, 12, 600).to(dtype)
    check(replace(x, q=wide[:, ::2, 10:586]))
    transposed = torch.randn(576, 6, 14).to(dtype)
    check(replace(x, q=transposed.permute(2, 1, 0)))


def test_int32_lengths_equal_int64_lengths() -> None:
    x = make()
    assert torch.equal(run(x)[0], run(replace(x, prefix_lens=x.prefix_lens.int()))[0])


def test_k_scale_scales_keys_and_values() -> None:
    check(replace(make(), k_scale=0.37))


def test_slots_beyond_two_gigabytes() -> None:
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


def test_same_bits_run_to_run_in_any_batch_and_with_any_number_of_threads() -> None:
    x = make(heads=16, width=12, prefixes=(3000, 100, 1700), dtype=torch.bfloat16)
    out, lse = run(x)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            again = run(x)
            assert torch.equal(again[0], out) and torch.equal(again[1], lse)
    finally:
        torch.set_num_threads(threads)
    alone = replace(x, q=x.q[12:24], table_rows=x.table_rows[1:2], prefix_lens=x.prefix_lens[1:2], mask=x.mask[12:24])
    assert torch.equal(run(alone)[0], out[12:24])


def test_rows_outside_the_request_are_not_read() -> None:
    """NaN in every slot that no request owns."""
    x = make(heads=2, width=5, prefixes=(20, 0))
    owned = torch.cat([x.slot_table[r, : p + 5] for r, p in zip(x.table_rows, (20, 0), strict=True)]).long()
    clean = x.kv_cache[owned].clone()
    x.kv_cache.fill_(float("nan"))
    x.kv_cache[owned] = clean
    out, lse = run(x)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {"q": x.q[..., :512]}, r"q must be \[batch \* width, heads, 576\].*\[8, 4, 512\]"),
        (lambda x: {"q": x.q[:, :1].expand(8, 129, 576)}, "1 to 128 heads"),
        (lambda x: {"q": x.q[:7]}, r"q must have batch \* width rows"),
        (lambda x: {"q": x.q[:1].expand(514, 4, 576), "mask": None}, "width .* must be 1 to 256, is 257"),
        (lambda x: {"kv_cache": x.kv_cache[:, 0]}, r"kv_cache must be \[slots, 1, 576\]"),
        (lambda x: {"kv_cache": x.kv_cache.half()}, "kv_cache must have q's type"),
        (lambda x: {"slot_table": x.slot_table.long()}, "slot_table must be int32"),
        (lambda x: {"table_rows": x.table_rows.int()}, "table_rows must be int64"),
        (lambda x: {"page": 0}, "page must be 1 or more, is 0"),
        (lambda x: {"prefix_lens": x.prefix_lens[:1]}, r"prefix_lens must be int32 or int64 \[2\]"),
        (lambda x: {"mask": x.mask[:4]}, r"tree_mask must be contiguous int32 \[8, 1\]"),
        (lambda x: {"table_rows": x.table_rows + 100}, "table_rows.*slot_table has 4 rows"),
        (lambda x: {"prefix_lens": x.prefix_lens + 1000}, "a row of slot_table holds"),
        (lambda x: {"slot_table": x.slot_table + 10000}, "kv_cache has slots 0 to"),
        (lambda x: {"slot_table": -x.slot_table - 1}, "kv_cache has slots 0 to"),
        (
            lambda x: {"q": x.q.to(torch.float8_e4m3fn), "kv_cache": x.kv_cache.to(torch.float8_e4m3fn)},
            "q must be bfloat16, float16 or float32",
        ),
    ],
)
def test_bad_arguments_are_named(change, message: str) -> None:  # noqa: ANN001
    x = make()
    with pytest.raises(RuntimeError, match=message):
        run(replace(x, **change(x)))


def test_fake_implementation_traces() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = make()
    with FakeTensorMode() as mode:
        q, kv, table, rows, lens = (
            mode.from_tensor(t) for t in (x.q, x.kv_cache, x.slot_table, x.table_rows, x.prefix_lens)
        )
        out = torch.empty(8, 4, 512)
        torch.ops.sgl_kernel.kdtree_mla_verify(q, kv, table, rows, 1, lens, None, SCALE, 1.0, out, None, None)
        with pytest.raises(RuntimeError, match="out must be contiguous"):
            torch.ops.sgl_kernel.kdtree_mla_verify(q, kv, table, rows, 1, lens, None, SCALE, 1.0, out[:4], None, None)


def test_torch_opcheck() -> None:
    x = make()
    out, lse = torch.empty(8, 4, 512), torch.empty(8, 4)
    # fmt: off
    torch.library.opcheck(
        torch.ops.sgl_kernel.kdtree_mla_verify.default,
        (x.q, x.kv_cache, x.slot_table, x.table_rows, 1, x.prefix_lens, packed_mask(x), SCALE, 1.0, out, lse, None),
        test_utils=("test_schema", "test_faketensor"))
    # fmt: on


@pytest.mark.skipif("KDTREE_CPU_ISA" in os.environ, reason="this is the run that the test starts")
@pytest.mark.parametrize("isa", ["avx2"])
def test_all_of_this_file_on_the_older_instruction_set(isa: str) -> None:
    env = os.environ | {"KDTREE_CPU_ISA": isa}
    # fmt: off
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", __file__], env=env, capture_output=True, text=True)
    # fmt: on
    assert done.returncode == 0, done.stdout[-4000:]
    code = "import sgl_kernel, torch; print(torch.ops.sgl_kernel.kdtree_mla_cpu_variant())"
    variant = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert variant.stdout.strip() == isa
