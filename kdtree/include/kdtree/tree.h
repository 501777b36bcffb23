// SPDX-License-Identifier: Apache-2.0
// A draft tree of one request, in arrays that someone else owns. Host and device.
//
// Node 0 is the root, the last committed token. Nodes stand in the order of their choice, so a parent's index is below
// its children's. Rows from `count` on are padding: they see themselves alone and no link leads to them.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KDTREE_INLINE __host__ __device__ inline
#else
#define KDTREE_INLINE inline
#endif

namespace kdtree {

struct Tree {
  int width;              // rows of the arrays, at most 256
  int words;              // of 32 bits, a row of the mask
  int64_t* tokens;        // [width]
  int32_t* parents;       // [width], -1 of the root and of padding
  int32_t* depths;        // [width], distance from the root; 0 of padding
  int32_t* ranks;         // [width], a node's rank among its position's tokens; 0 of the root and of padding
  uint32_t* mask;         // [width, words], bit j of row i: node i sees node j
  int64_t* next_token;    // [width], the first child, or -1
  int64_t* next_sibling;  // [width], the parent's next child, or -1
};

// Writes row i as one that sees itself alone.
KDTREE_INLINE void clear_row(const Tree& tree, int i) {
  tree.tokens[i] = 0;
  tree.parents[i] = -1;
  tree.depths[i] = 0;
  tree.ranks[i] = 0;
  for (int w = 0; w < tree.words; ++w) tree.mask[i * tree.words + w] = 0;
  tree.mask[i * tree.words + i / 32] |= 1u << (i % 32);
  tree.next_token[i] = -1;
  tree.next_sibling[i] = -1;
}

// Writes row i as a child of `parent`, whose other children have lower indices.
KDTREE_INLINE void add_node(const Tree& tree, int i, int parent, int rank, int64_t token) {
  clear_row(tree, i);
  tree.tokens[i] = token;
  tree.parents[i] = parent;
  tree.depths[i] = tree.depths[parent] + 1;
  tree.ranks[i] = rank;
  for (int w = 0; w < tree.words; ++w) tree.mask[i * tree.words + w] |= tree.mask[parent * tree.words + w];
  int64_t* link = &tree.next_token[parent];
  while (*link != -1) link = &tree.next_sibling[*link];
  *link = i;
}

}  // namespace kdtree
