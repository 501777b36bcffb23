// SPDX-License-Identifier: Apache-2.0
// Moves the accepted nodes' cache rows to the front of their request's slots.
#pragma once

#include "../attention/kdtree_mla/primitives.cuh"
#include "tree_params.h"

namespace kdtree {

constexpr int kMoveThreads = 128;
constexpr int kMovedAtOnce = 4;  // rows

// Grid: a block a layer and request. A thread has columns of its own, and goes through the path in order: row i comes
// from a node that is not below i, so what is written over has been read.
KDTREE_KERNEL(kMoveThreads, 1)
move_rows_kernel(const MoveParams p) {
  const int layer = block_index() / p.batch;
  const int64_t request = block_index() % p.batch;
  const int count = p.counts[request];
  const int32_t* path = p.paths + request * p.limit;
  const int64_t* slots = p.slots + request * p.width;
  int first = 0;
  while (first < count && path[first] == first) ++first;  // where it is already
  unsigned char* cache = reinterpret_cast<unsigned char*>(p.caches[layer]);
  for (int column = thread_index() * 16; column < p.row_bytes; column += kMoveThreads * 16) {
    for (int start = first; start < count; start += kMovedAtOnce) {
      uint4 held[kMovedAtOnce];
      for (int i = 0; i < kMovedAtOnce; ++i) {
        if (start + i >= count) break;
        held[i] = *reinterpret_cast<const uint4*>(cache + slots[path[start + i]] * p.row_bytes + column);
      }
      for (int i = 0; i < kMovedAtOnce; ++i) {
        if (start + i >= count) break;
        *reinterpret_cast<uint4*>(cache + slots[start + i] * p.row_bytes + column) = held[i];
      }
    }
  }
}

}  // namespace kdtree
