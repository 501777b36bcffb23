// SPDX-License-Identifier: Apache-2.0
// The ops of draft trees on a GPU: the headers of kdtree/, with the heap's work shared by the lanes of a warp.
#pragma once

#include <kdtree/accept.h>
#include <kdtree/build.h>

#include "../attention/kdtree_mla/primitives.cuh"
#include "tree_params.h"

namespace kdtree {

constexpr int kTreeThreads = 32;

// Shared memory of a block: the request's tree, its nodes' scores, and the frontier. A taken node brings two places
// to the frontier: 2 i for its first child and 2 i + 1 for its next sibling; a place of score -inf is empty.
struct TreeStorage {
  int scores, frontier, tokens, next_token, next_sibling, parents, depths, ranks, mask, bytes;

  KDTREE_INLINE TreeStorage(int width, int words) {
    frontier = 0;
    scores = frontier + 2 * width * static_cast<int>(sizeof(Candidate));
    tokens = scores + width * 8;
    next_token = tokens + width * 8;
    next_sibling = next_token + width * 8;
    parents = next_sibling + width * 8;
    depths = parents + width * 4;
    ranks = depths + width * 4;
    mask = ranks + width * 4;
    bytes = mask + width * words * 4;
  }
};

// The better of this lane's candidate and the one that `lane ^ step` has; `place` is where it stands, -1: none.
KDTREE_DEVICE void take_better(const Tree& tree, Candidate& best, int& place, int step) {
  const Candidate other{shuffle_xor(best.score, step), shuffle_xor(best.parent, step), shuffle_xor(best.rank, step)};
  const int other_place = shuffle_xor(place, step);
  if (other_place >= 0 && (place < 0 || better(tree, other, best))) {
    best = other;
    place = other_place;
  }
}

// Grid: a warp a request. kdtree::build_tree with a search over the frontier in place of the heap: a tree has few
// nodes, and 32 lanes look at all of its frontier in a step or two.
KDTREE_KERNEL(kTreeThreads, 1)
build_tree_kernel(const BuildParams p) {
  const int lane = lane_index();
  const int64_t request = block_index();
  const TreeStorage at(p.width, p.words);
  // clang-format off
  const Tree tree{p.width, p.words, shared_pointer<int64_t>(at.tokens), shared_pointer<int32_t>(at.parents),
                  shared_pointer<int32_t>(at.depths), shared_pointer<int32_t>(at.ranks),
                  shared_pointer<uint32_t>(at.mask), shared_pointer<int64_t>(at.next_token),
                  shared_pointer<int64_t>(at.next_sibling)};
  // clang-format on
  double* scores = shared_pointer<double>(at.scores);
  Candidate* frontier = shared_pointer<Candidate>(at.frontier);
  const int64_t first_drafted = request * p.positions * p.top_k;
  const Drafted drafted{p.positions, p.top_k, p.log_probs + first_drafted, p.token_ids + first_drafted};
  const auto offer = [&](int place, int32_t parent, int32_t rank) {
    if (!offered(tree, drafted, parent, scores[parent], rank, &frontier[place])) frontier[place].score = -HUGE_VAL;
  };

  int count = 1;
  if (lane == 0) {
    clear_row(tree, 0);
    tree.tokens[0] = p.roots[request];
    scores[0] = 0;
    frontier[1].score = -HUGE_VAL;
    offer(0, 0, 0);
    while (p.spine && count < p.width && frontier[2 * count - 2].score > -HUGE_VAL) {
      const Candidate next = frontier[2 * count - 2];
      frontier[2 * count - 2].score = -HUGE_VAL;
      take(tree, drafted, count, next);
      scores[count] = next.score;
      offer(2 * count, count, 0);
      offer(2 * count + 1, next.parent, 1);
      ++count;
    }
  }
  count = shuffle(count, 0);
  while (count < p.width) {
    warp_barrier();
    Candidate best{-HUGE_VAL, 0, 0};
    int place = -1;
    for (int i = lane; i < 2 * count; i += 32) {
      if (frontier[i].score > -HUGE_VAL && (place < 0 || better(tree, frontier[i], best))) {
        best = frontier[i];
        place = i;
      }
    }
    for (int step = 16; step > 0; step /= 2) take_better(tree, best, place, step);
    if (place < 0 || best.score < p.min_log_prob) break;
    if (lane == 0) {
      frontier[place].score = -HUGE_VAL;
      take(tree, drafted, count, best);
      scores[count] = best.score;
      offer(2 * count, count, 0);
    } else if (lane == 1) {
      offer(2 * count + 1, best.parent, best.rank + 1);
    }
    ++count;
  }
  warp_barrier();
  for (int i = count + lane; i < p.width; i += 32) clear_row(tree, i);
  warp_barrier();
  const int64_t first = request * p.width;
  for (int i = lane; i < p.width; i += 32) {
    p.tokens[first + i] = tree.tokens[i];
    p.parents[first + i] = tree.parents[i];
    p.depths[first + i] = tree.depths[i];
    p.next_token[first + i] = tree.next_token[i];
    p.next_sibling[first + i] = tree.next_sibling[i];
  }
  for (int i = lane; i < p.width * p.words; i += 32) p.tree_mask[first * p.words + i] = tree.mask[i];
  if (lane == 0) p.counts[request] = count;
}

// Grid: a thread a request. The walk is as long as the accepted path.
KDTREE_KERNEL(kTreeThreads, 1)
accept_kernel(const AcceptParams p) {
  const int64_t request = int64_t{block_index()} * kTreeThreads + thread_index();
  if (request >= p.batch) return;
  const int64_t first = request * p.width;
  const Verified tree{p.tokens + first, p.next_token + first, p.next_sibling + first, p.drawn + first};
  int32_t* path = p.paths + request * p.limit;
  const int count = accept(tree, p.limit, path);
  for (int i = count; i < p.limit; ++i) path[i] = -1;
  p.counts[request] = count;
  p.bonus[request] = tree.drawn[path[count - 1]];
}

}  // namespace kdtree
