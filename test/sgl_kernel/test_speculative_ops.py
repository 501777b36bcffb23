# SPDX-License-Identifier: Apache-2.0
"""The CPU ops that upstream's speculative path calls, through upstream's own wrappers, against plain numpy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import sgl_kernel
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sgl_kernel import speculative as ops

from kdtree_spec import oracle

seeds = st.integers(0, 2**32 - 1)
integers = st.sampled_from([torch.int32, torch.int64])


def random_parents(rng: np.random.Generator, nodes: int) -> list[int]:
    return [-1] + [int(rng.integers(0, i)) for i in range(1, nodes)]


def links(parents: list[int]) -> tuple[list[int], list[int]]:
    """First child and next sibling of each node (-1: none), children in ascending order."""
    children = [[c for c, p in enumerate(parents) if p == node] for node in range(len(parents))]
    first = [c[0] if c else -1 for c in children]
    sibling = [-1] * len(parents)
    for siblings in children:
        for a, b in itertools.pairwise(siblings):
            sibling[a] = b
    return first, sibling


def depths(parents: list[int]) -> list[int]:
    out: list[int] = []
    for parent in parents:
        out.append(0 if parent < 0 else out[parent] + 1)
    return out


@settings(max_examples=30, deadline=None)
@given(batch=st.integers(1, 4), dtype=integers, seed=seeds)
def test_slots_to_and_from_the_request_table(batch: int, dtype: torch.dtype, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = torch.full((6, 40), -7, dtype=torch.int32)
    rows = rng.permutation(6)[:batch]
    starts = rng.integers(0, 20, batch)
    ends = starts + rng.integers(0, 15, batch)
    slots = rng.permutation(1000)[: int((ends - starts).sum())]
    as_tensor = lambda x: torch.from_numpy(np.asarray(x)).to(dtype)  # noqa: E731
    arguments = as_tensor(rows), table, as_tensor(starts), as_tensor(ends)
    ops.assign_req_to_token_pool_cpu(*arguments, as_tensor(slots), 40)
    want = np.full((6, 40), -7)
    taken = 0
    for row, start, end in zip(rows, starts, ends, strict=True):
        want[row, start:end] = slots[taken : taken + end - start]
        taken += end - start
    np.testing.assert_array_equal(table.numpy(), want)
    read_back = torch.full((len(slots),), -1, dtype=torch.int64)
    ops.assign_extend_cache_locs_cpu(*arguments, read_back, 40)
    np.testing.assert_array_equal(read_back.numpy(), slots)


def test_draft_slots_follow_the_committed_ones() -> None:
    table = torch.arange(200, dtype=torch.int32).view(4, 50)
    out = torch.full((2, 6), -1, dtype=torch.int64)
    rows, lens = torch.tensor([3, 1]), torch.tensor([10, 0])
    ops.assign_draft_cache_locs_contiguous_cpu(rows, table, lens, out, 50, 2, 3)
    assert out.tolist() == [list(range(160, 166)), list(range(50, 56))]
    draft = ops.build_draft_decode_metadata_cpu(table, rows, lens, 2, 3, 50)
    assert draft.shape == (4, 50) and draft.dtype == torch.int32
    assert draft[1, :13].tolist() == [*range(150, 160), 163, 164, 165]  # request 0, branch 1
    assert draft[2, :3].tolist() == [50, 51, 52]


@settings(max_examples=50, deadline=None)
@given(nodes=st.integers(1, 40), batch=st.integers(1, 3), seed=seeds)
def test_links_and_positions_of_any_tree(nodes: int, batch: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    all_parents = [random_parents(rng, nodes) for _ in range(batch)]
    mask = torch.from_numpy(np.stack([oracle.ancestor_mask(p) for p in all_parents])).flatten()
    lens = torch.from_numpy(rng.integers(0, 100, batch))
    positions = torch.full((batch * nodes,), -9)
    index, first, sibling = (torch.full((batch, nodes), -9) for _ in range(3))
    ops.reconstruct_indices_from_tree_mask(mask, lens, positions, index, first, sibling, batch, nodes)
    assert index.flatten().tolist() == list(range(batch * nodes))
    for b, parents in enumerate(all_parents):
        want_first, want_sibling = links(parents)
        assert first[b].tolist() == want_first and sibling[b].tolist() == want_sibling
        assert positions.view(batch, nodes)[b].tolist() == [int(lens[b]) + d for d in depths(parents)]


def greedy_walk(parents: list[int], tokens: list[int], choice: list[int], longest: int) -> list[int]:
    path = [0]
    while len(path) < longest:
        matching = [c for c, p in enumerate(parents) if p == path[-1] and tokens[c] == choice[path[-1]]]
        if not matching:
            break
        path.append(matching[0])
    return path


@settings(max_examples=50, deadline=None)
@given(nodes=st.integers(1, 40), longest=st.integers(1, 10), batch=st.integers(1, 3), seed=seeds)
def test_greedy_accept_walk(nodes: int, longest: int, batch: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    all_parents = [random_parents(rng, nodes) for _ in range(batch)]
    tokens = rng.integers(0, 3, (batch, nodes))  # few tokens: walks go on, and 0 is a token like any other
    choice = rng.integers(0, 3, (batch, nodes))
    first = torch.tensor([links(p)[0] for p in all_parents])
    sibling = torch.tensor([links(p)[1] for p in all_parents])
    index = torch.arange(batch * nodes).view(batch, nodes)
    predicts = torch.full((batch * nodes,), -5, dtype=torch.int32)
    accepted = torch.full((batch, longest), -1, dtype=torch.int32)
    counts = torch.full((batch,), -5, dtype=torch.int32)
    ops.verify_tree_greedy_cpu(
        predicts, accepted, counts, torch.from_numpy(tokens), index, first, sibling, torch.from_numpy(choice)
    )
    for b, parents in enumerate(all_parents):
        path = greedy_walk(parents, tokens[b].tolist(), choice[b].tolist(), longest)
        assert counts[b] == len(path) - 1
        assert accepted[b].tolist() == [b * nodes + n for n in path] + [-1] * (longest - len(path))
        assert predicts[b * nodes + np.array(path)].tolist() == choice[b][path].tolist()


def test_compaction_and_bonus_tokens() -> None:
    index = torch.tensor([[0, 2, -1], [3, -1, -1], [6, 7, 8]], dtype=torch.int32)
    slots = torch.arange(100, 109)
    out = torch.zeros(6, dtype=torch.int64)
    ops.fill_accept_out_cache_loc_cpu(index, slots, out)
    assert out.tolist() == [100, 102, 103, 106, 107, 108]
    bonus = torch.zeros(3, dtype=torch.int64)
    ops.fill_bonus_tokens_cpu(torch.arange(9, dtype=torch.int32), torch.tensor([2, 1, 3], dtype=torch.int32), bonus, 3)
    assert bonus.tolist() == [1, 3, 8]


def test_rotation_of_input_ids() -> None:
    ids = torch.tensor([1, 2, 3, 4, 5, 6])
    starts, lens, new = torch.tensor([0, 3, 3]), torch.tensor([3, 0, 3]), torch.tensor([70, 80, 90])
    ops.rotate_input_ids_cpu(ids, starts, lens, new)
    assert ids.tolist() == [2, 3, 70, 5, 6, 90]
    ids = torch.tensor([1, 2, 3, 4, 5, 6])
    ops.rotate_input_ids_cpu(ids, starts, lens, new, torch.tensor([1, 0, 4]))
    assert ids.tolist() == [2, 70, 3, 5, 90, 6]


@pytest.mark.parametrize("full", [True, False])
def test_eagle_tree_from_the_drafts_choices(full: bool) -> None:
    """topk 2, two levels: candidates 0, 1 below the root, then 2, 3 below 0 and 4, 5 below 1."""
    parent_list = torch.tensor([[-1, 0, 1], [-1, 0, 1]])
    selected = torch.tensor([[0, 1, 3, 4], [0, 2, 3, 5]])  # in the second tree, node 4's parent was not selected
    lens = torch.tensor([3, 1])
    size = 5 * (3 + 5) + 5 * (1 + 5) if full else 50
    mask = torch.ones(size, dtype=torch.bool)
    positions = torch.full((10,), -9)
    index, first, sibling = torch.full((2, 5), -9), torch.full((2, 5), -1), torch.full((2, 5), -1)
    ops.build_tree_kernel_efficient_cpu(
        parent_list, selected, lens, mask, positions, index, first, sibling, 2, 2, 5, 0 if full else 1
    )
    want = oracle.ancestor_mask([-1, 0, 0, 1, 2])
    got = mask[: 5 * 8].view(5, 8)[:, 3:] if full else mask[:25].view(5, 5)
    np.testing.assert_array_equal(got.numpy(), want)
    assert not full or mask[: 5 * 8].view(5, 8)[:, :3].all()
    assert positions[:5].tolist() == [3, 4, 4, 5, 5] and index.flatten().tolist() == list(range(10))
    assert first[0].tolist() == [1, 3, 4, -1, -1] and sibling[0].tolist() == [-1, 2, -1, -1, -1]
    assert first[1].tolist() == [1, 2, -1, -1, -1] and sibling[1].tolist() == [-1, -1, 3, -1, -1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kv_rows_move_as_if_all_were_read_first(dtype: torch.dtype) -> None:
    layers = [torch.randn(20, 1, 576).to(dtype) for _ in range(3)]
    before = [layer.clone() for layer in layers]
    pointers = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)
    strides = torch.full((3,), layers[0][0].nbytes)
    source, target = torch.tensor([5, 6, 7, 9]), torch.tensor([4, 5, 6, 7])
    sgl_kernel.copy_all_layer_kv_cache_cpu(pointers, strides, target, source)
    for layer, old in zip(layers, before, strict=True):
        want = old.clone()
        want[target] = old[source]
        assert torch.equal(layer, want)


def test_index_out_of_range_is_an_error() -> None:
    with pytest.raises(IndexError, match="out_cache_loc: index 50 out of range, it has 9 values"):
        ops.fill_accept_out_cache_loc_cpu(torch.tensor([50]), torch.arange(9), torch.zeros(1, dtype=torch.int64))


def test_wrong_type_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="accept_lens must be int32, int64 or bool, is Float"):
        ops.fill_bonus_tokens_cpu(torch.arange(3), torch.ones(1), torch.zeros(1, dtype=torch.int64), 3)
