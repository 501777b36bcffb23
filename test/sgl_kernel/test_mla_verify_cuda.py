# SPDX-License-Identifier: Apache-2.0
"""kdtree_mla_verify on a GPU against the numpy oracle. Skipped where there is none.

`make sanitize` runs the tests marked `sanitize` under compute-sanitizer's memcheck and racecheck.
KDTREE_CUDA_LIBRARY names another library than the one that `make kernels` builds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kdtree_spec import oracle
from problems import Inputs, compare, make, packed_mask

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; none is here")

LIBRARY = Path(__file__).resolve().parents[2] / "sgl-kernel" / "python" / "sgl_kernel" / "kdtree_cuda.so"
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3}
POISON = 0xFF  # as bf16, fp16 and fp32: NaN


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    if torch.cuda.is_available() and not hasattr(torch.ops.sgl_kernel, "kdtree_mla_plan"):
        torch.ops.load_library(os.environ.get("KDTREE_CUDA_LIBRARY", str(LIBRARY)))


def to_gpu(x: Inputs) -> Inputs:
    moved = {name: getattr(x, name).cuda() for name in ("q", "kv_cache", "slot_table", "table_rows", "prefix_lens")}
    return replace(x, **moved)


class Call:
    """A call's arguments on the GPU; running it writes out and lse over poison, with a poisoned workspace."""

    def __init__(self, x: Inputs) -> None:
        self.x = x
        batch, heads = len(x.table_rows), x.q.shape[1]
        size = torch.ops.sgl_kernel.kdtree_mla_workspace_bytes(heads, len(x.q) // max(batch, 1), x.q.device.index)
        self.workspace = torch.empty(size, dtype=torch.uint8, device=x.q.device)
        self.mask = packed_mask(x)
        self.out = torch.empty(*x.q.shape[:2], 512, dtype=x.q.dtype, device=x.q.device)
        self.lse = torch.empty(x.q.shape[:2], device=x.q.device)

    def poison(self) -> None:
        for tensor in (self.workspace, self.out, self.lse):
            tensor.view(torch.uint8).fill_(POISON)

    def launch(self) -> None:
        x = self.x
        # fmt: off
        torch.ops.sgl_kernel.kdtree_mla_verify(x.q, x.kv_cache, x.slot_table, x.table_rows, x.page, x.prefix_lens,
                                               self.mask, x.sm_scale, x.k_scale, self.out, self.lse, self.workspace)
        # fmt: on

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.poison()
        self.launch()
        return self.out, self.lse


def check(x: Inputs) -> None:
    compare(x, *Call(to_gpu(x))(), TOLERANCE[x.q.dtype])


@pytest.mark.parametrize("width", [1, 2, 5, 8, 16, 17, 32, 33, 64, 128, 256])
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8, 16, 20, 32, 64, 128])
def test_equals_oracle_for_heads_and_widths(heads: int, width: int) -> None:
    seed = int(np.random.default_rng().integers(2**31))
    print(f"seed {seed}")
    for dtype in TOLERANCE:
        for chain in (False, True):
            check(make(heads, width, (90, 0, 700), dtype, chain=chain, seed=seed))


@pytest.mark.parametrize("page", [1, 16, 32, 64])
@pytest.mark.parametrize("batch", [1, 2, 7, 16, 33, 64])
def test_uneven_batches_up_to_128k(batch: int, page: int) -> None:
    rng = np.random.default_rng(batch * 100 + page)
    prefixes = [int(n) for n in rng.choice([0, 1, 15, 16, 17, 500, 4096, 9000], batch)]
    prefixes[int(rng.integers(batch))] = 131072
    check(make(2, 3, tuple(prefixes), torch.bfloat16, page=page, seed=batch))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "width", "prefixes"), [(4, 3, (100, 0, 37)), (8, 16, (700, 5)), (16, 1, (2000,))])
def test_reduced_set_for_the_sanitizer(heads: int, width: int, prefixes: tuple[int, ...], dtype: torch.dtype) -> None:
    check(make(heads, width, prefixes, dtype))
    check(make(heads, width, prefixes, dtype, page=16, chain=True))


@pytest.mark.parametrize("shape", ["star", "deep chain", "siblings of a chain", "another tree each request"])
def test_tree_shapes(shape: str) -> None:
    width = 67
    x = make(heads=8, width=width, prefixes=(50, 0, 3000), dtype=torch.bfloat16)
    parents = {
        "star": [-1] + [0] * (width - 1),
        "deep chain": list(range(-1, width - 1)),
        "siblings of a chain": [-1] + [max(0, (i - 1) // 2 * 2) for i in range(1, width)],
    }
    if shape in parents:
        x = replace(x, mask=np.tile(oracle.ancestor_mask(parents[shape]), (3, 1)))
    check(x)


def test_absent_requests_and_rows_that_see_nothing() -> None:
    x = make(width=5, prefixes=(0, 30, 500), dtype=torch.bfloat16)
    x.mask[2] = False
    x.prefix_lens[1] = -1
    out, lse = Call(to_gpu(x))()
    assert (out[2] == 0).all() and torch.isneginf(lse[2]).all()
    assert (out[5:10] == 0).all() and torch.isneginf(lse[5:10]).all()
    check(x)


def test_zero_queries_and_keys_give_the_mean_of_the_visible_values() -> None:
    x = make(heads=8, width=9, prefixes=(5, 0), dtype=torch.bfloat16)
    x.q.zero_()
    for b, prefix in enumerate((5, 0)):
        row = x.slot_table[x.table_rows[b]]
        x.kv_cache[row[: prefix + 9].long(), 0, :512] = torch.arange(prefix + 9).bfloat16()[:, None]
    out, _ = Call(to_gpu(x))()
    for b, prefix in enumerate((5, 0)):
        for i in range(9):
            seen = list(range(prefix)) + [prefix + j for j in np.flatnonzero(x.mask[b * 9 + i])]
            mean = torch.tensor(seen).double().mean()
            torch.testing.assert_close(out[b * 9 + i].double().cpu(), mean.expand(8, 512), rtol=1e-2, atol=1e-2)


def test_slots_beyond_two_gigabytes() -> None:
    x = to_gpu(make(heads=2, width=4, prefixes=(6,), dtype=torch.bfloat16))
    rows = 2**32 // (576 * 2) + 100
    cache = torch.full((rows, 1, 576), float("nan"), dtype=torch.bfloat16, device="cuda")
    table = x.slot_table.clone()
    used = x.slot_table[x.table_rows[0], :10]
    far = torch.arange(10, dtype=torch.int32, device="cuda") * 7 + rows - 80
    cache[far.long()] = x.kv_cache[used.long()]
    table[x.table_rows[0], :10] = far
    assert torch.equal(Call(replace(x, kv_cache=cache, slot_table=table))()[0], Call(x)()[0])


@pytest.mark.parametrize(("heads", "width", "prefixes"), [(8, 16, (65536,)), (16, 1, (9000, 3)), (64, 32, (4000, 100))])
def test_same_bits_run_to_run(heads: int, width: int, prefixes: tuple[int, ...]) -> None:
    call = Call(to_gpu(make(heads, width, prefixes, torch.bfloat16)))
    first = [t.clone() for t in call()]
    for _ in range(20):
        again = call()
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize(("heads", "width"), [(8, 16), (16, 1), (64, 8)])
def test_captured_graph_follows_lengths_slots_and_masks(heads: int, width: int, chain: bool) -> None:
    """One graph, captured with empty requests, replayed for other requests."""
    longest = 5000
    problems = [
        make(heads, width, prefixes, torch.bfloat16, chain=chain, seed=seed)
        for seed, prefixes in enumerate([(0, 0, 0), (longest, 3, 90), (1, 0, longest), (-1, 700, -1)])
    ]
    columns, rows, slots = longest + width + 8, 8, 8 * (longest + width + 8)
    x = to_gpu(problems[0])
    x = replace(
        x,
        kv_cache=torch.zeros(slots, 1, 576, dtype=torch.bfloat16, device="cuda"),
        slot_table=torch.zeros(rows, columns, dtype=torch.int32, device="cuda"),
    )
    call = Call(x)
    call()  # once before the capture, as a server's warm-up does
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.launch()
    for problem in problems:
        prefixes = problem.prefix_lens
        problem = replace(problem, prefix_lens=prefixes)
        x.q.copy_(problem.q)
        x.kv_cache[: len(problem.kv_cache)].copy_(problem.kv_cache)
        x.slot_table[: problem.slot_table.shape[0], : problem.slot_table.shape[1]].copy_(problem.slot_table)
        x.table_rows.copy_(problem.table_rows)
        x.prefix_lens.copy_(prefixes)
        if not chain:
            call.mask.copy_(packed_mask(problem))
        call.poison()
        graph.replay()
        compare(problem, call.out, call.lse, TOLERANCE[torch.bfloat16])


def test_no_allocation_and_no_synchronisation() -> None:
    call = Call(to_gpu(make(heads=8, width=16, prefixes=(9000, 3), dtype=torch.bfloat16)))
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        # Behind a kernel that takes 50 ms: a launch that waited for the device would take as long.
        torch.cuda._sleep(100_000_000)
        event = torch.cuda.Event()
        for _ in range(5):
            call.launch()
        event.record()
        assert not event.query(), "the launches waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_two_streams_do_not_disturb_each_other() -> None:
    calls = [Call(to_gpu(make(8, 16, (3000 + i,), torch.bfloat16, seed=i))) for i in range(2)]
    wanted = [call()[0].clone() for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(20):
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                call()
    torch.cuda.synchronize()
    for call, want in zip(calls, wanted, strict=True):
        assert torch.equal(call.out, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda call: setattr(call, "workspace", None), "workspace must be uint8"),
        (
            lambda call: setattr(call, "workspace", call.workspace[:100]),
            "workspace must be contiguous uint8 of at least",
        ),
        (lambda call: setattr(call, "x", replace(call.x, kv_cache=call.x.kv_cache.cpu())), "kv_cache must be on q's"),
        (lambda call: setattr(call, "x", replace(call.x, q=call.x.q.float())), "kv_cache must have q's type"),
    ],
)
def test_bad_arguments_are_named(change: Callable[[Call], None], message: str) -> None:
    call = Call(to_gpu(make(heads=8, width=16, prefixes=(100,), dtype=torch.bfloat16)))
    change(call)
    with pytest.raises(RuntimeError, match=message):
        call.launch()


def test_torch_compile_traces_the_op() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    call = Call(to_gpu(make(heads=8, width=16, prefixes=(100,), dtype=torch.bfloat16)))
    with FakeTensorMode() as mode:
        x = call.x
        fake = [mode.from_tensor(t) for t in (x.q, x.kv_cache, x.slot_table, x.table_rows, x.prefix_lens, call.out)]
        # fmt: off
        torch.ops.sgl_kernel.kdtree_mla_verify(*fake[:4], 1, fake[4], None, 1.0, 1.0, fake[5], None, None)
        # fmt: on
