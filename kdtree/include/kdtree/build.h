// SPDX-License-Identifier: Apache-2.0
// The best-first tree of a budget of nodes. DDTree (Ringel & Romano, arXiv 2604.12989), Algorithm 1.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "tree.h"

namespace kdtree {

// What the drafter says of the positions after the root: log-probabilities of each one's likeliest tokens, likeliest
// first, and the tokens.
struct Drafted {
  int positions;
  int top_k;
  const float* log_probs;    // [positions, top_k]
  const int64_t* token_ids;  // [positions, top_k]
};

struct BuildOptions {
  bool spine;           // the path of the likeliest tokens goes in before all else
  double min_log_prob;  // the search ends at the first node that scores less; the spine is exempt
};

// A node that could be next: the child of `parent` with its position's token of rank `rank`.
struct Candidate {
  double score;  // sum of log-probabilities, from the root down
  int32_t parent;
  int32_t rank;
};

// The tuples of ranks from the root to a and to b, compared as words are in a dictionary.
KDTREE_INLINE bool ranks_before(const Tree& tree, Candidate a, Candidate b) {
  const int depth_a = tree.depths[a.parent], depth_b = tree.depths[b.parent];
  int32_t rank_a = a.rank, parent_a = a.parent;
  int32_t rank_b = b.rank, parent_b = b.parent;
  for (int d = depth_a; d > depth_b; --d) {
    rank_a = tree.ranks[parent_a];
    parent_a = tree.parents[parent_a];
  }
  for (int d = depth_b; d > depth_a; --d) {
    rank_b = tree.ranks[parent_b];
    parent_b = tree.parents[parent_b];
  }
  int order = depth_a - depth_b;  // where one is the other's beginning, the shorter comes first
  for (;;) {
    if (rank_a != rank_b) order = rank_a - rank_b;  // the difference nearest to the root decides
    if (parent_a == parent_b) return order < 0;
    rank_a = tree.ranks[parent_a];
    parent_a = tree.parents[parent_a];
    rank_b = tree.ranks[parent_b];
    parent_b = tree.parents[parent_b];
  }
}

// Whether a is to be taken before b.
KDTREE_INLINE bool better(const Tree& tree, Candidate a, Candidate b) {
  return a.score != b.score ? a.score > b.score : ranks_before(tree, a, b);
}

// Whether there is such a child; if so `candidate` is it. A token of log-probability -inf or NaN is none.
KDTREE_INLINE bool offered(
    const Tree& tree, const Drafted& drafted, int32_t parent, double parent_score, int32_t rank, Candidate* candidate) {
  const int position = tree.depths[parent];
  if (position >= drafted.positions || rank >= drafted.top_k) return false;
  const float log_prob = drafted.log_probs[position * drafted.top_k + rank];
  if (!(log_prob > -HUGE_VALF)) return false;
  *candidate = {parent_score + static_cast<double>(log_prob), parent, rank};
  return true;
}

KDTREE_INLINE void take(const Tree& tree, const Drafted& drafted, int i, Candidate c) {
  add_node(tree, i, c.parent, c.rank, drafted.token_ids[tree.depths[c.parent] * drafted.top_k + c.rank]);
}

// Fills `tree` and returns how many nodes it has, the root counted. Host.
inline int build_tree(const Drafted& drafted, int64_t root, const BuildOptions& options, const Tree& tree) {
  clear_row(tree, 0);
  tree.tokens[0] = root;
  std::vector<double> scores(tree.width, 0.0);
  std::vector<Candidate> heap;
  const auto worse = [&](const Candidate& a, const Candidate& b) { return better(tree, b, a); };
  const auto offer = [&](int32_t parent, int32_t rank) {
    Candidate c;
    if (!offered(tree, drafted, parent, scores[parent], rank, &c)) return;
    heap.push_back(c);
    std::push_heap(heap.begin(), heap.end(), worse);
  };
  int count = 1;
  if (options.spine) {
    Candidate c;
    while (count < tree.width && offered(tree, drafted, count - 1, scores[count - 1], 0, &c)) {
      take(tree, drafted, count, c);
      scores[count++] = c.score;
    }
    for (int32_t parent = 0; parent + 1 < count; ++parent) offer(parent, 1);
  } else {
    offer(0, 0);
  }
  while (count < tree.width && !heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), worse);
    const Candidate c = heap.back();
    heap.pop_back();
    if (c.score < options.min_log_prob) break;
    take(tree, drafted, count, c);
    scores[count++] = c.score;
    offer(c.parent, c.rank + 1);
    offer(count - 1, 0);
  }
  for (int i = count; i < tree.width; ++i) clear_row(tree, i);
  return count;
}

}  // namespace kdtree
