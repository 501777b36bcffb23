# SPDX-License-Identifier: Apache-2.0
"""The oracle on cases that can be worked out by hand."""

from __future__ import annotations

import numpy as np

from kdtree_spec import oracle


def test_equal_scores_give_the_mean_of_what_a_node_sees() -> None:
    kv = np.zeros((10, 1, 576))
    kv[:, 0, :512] = np.arange(10)[:, None]
    mask = oracle.ancestor_mask([-1, 0, 0])
    # Slots 7, 2 are committed, 5, 1, 4 are the tree's.
    table = np.array([[7, 2, 5, 1, 4]])
    out, lse = oracle.mla_verify(np.zeros((3, 2, 576)), kv, table, np.array([0]), 1, np.array([2]), mask, 1.0)
    np.testing.assert_allclose(out[:, 0, 0], [(7 + 2 + 5) / 3, (7 + 2 + 5 + 1) / 4, (7 + 2 + 5 + 4) / 4])
    np.testing.assert_allclose(lse[:, 1], np.log([3, 4, 4]))


def test_packed_words() -> None:
    mask = np.zeros((1, 40), np.bool_)
    mask[0, [0, 31, 33]] = True
    assert oracle.pack_tree_mask(mask).tolist() == [[1 - 2**31, 2]]


def test_ancestors() -> None:
    assert oracle.ancestor_mask([-1, 0, 1, 0]).astype(int).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 0, 0, 1],
    ]


def test_absent_request_and_blind_row() -> None:
    arguments = np.ones((2, 1, 576)), np.ones((4, 1, 576)), np.array([[0, 1]]), np.array([0, 0]), 1
    out, lse = oracle.mla_verify(*arguments, np.array([-1, 0]), np.array([[True], [False]]), 1.0)
    assert not out.any() and np.isneginf(lse).all()
