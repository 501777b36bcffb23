// SPDX-License-Identifier: Apache-2.0
// Which nodes of a verified tree are kept. DDTree (arXiv 2604.12989), section 3.3. Host and device.
#pragma once

#include "tree.h"

namespace kdtree {

// A tree, as far as the walk needs it, and the token that the target chose after each node: its best one, or one draw
// from its distribution.
struct Verified {
  const int64_t* tokens;
  const int64_t* next_token;
  const int64_t* next_sibling;
  const int64_t* drawn;
};

// Walks from the root along the target's choices. Writes the accepted nodes, root first, to `path` and returns their
// number, at most `limit`. drawn[path[number - 1]] is the next tree's root.
KDTREE_INLINE int accept(const Verified& tree, int limit, int32_t* path) {
  int number = 1;
  path[0] = 0;
  while (number < limit) {
    const int node = path[number - 1];
    int64_t child = tree.next_token[node];
    while (child != -1 && tree.tokens[child] != tree.drawn[node]) child = tree.next_sibling[child];
    if (child == -1) break;
    path[number++] = static_cast<int32_t>(child);
  }
  return number;
}

}  // namespace kdtree
