# SPDX-License-Identifier: Apache-2.0
"""The speculative algorithm DDTREE: a DFlash drafter's trees, verified by the attention backend kdtree_mla."""
