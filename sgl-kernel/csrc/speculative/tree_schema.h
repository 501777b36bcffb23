// SPDX-License-Identifier: Apache-2.0
// The ops of draft trees, the same for every device.
//
// clang-format off
// kdtree_top_k: the likeliest tokens of each row of logits.
//   logits        [rows, vocabulary]               fp32, bf16 or fp16; NaN is taken for -inf
//   first_id      int                              the id of column 0: a rank may have a shard of the vocabulary
//   log_probs     [rows, top_k]                    fp32, written: of the row's softmax, likeliest first, of equals the
//                                                  smaller id first; top_k, 1 to 256, is at most the vocabulary
//   token_ids     [rows, top_k]                    int64, written
//   normalisers   [rows]                           fp32, written: log of the sum of exp of the row
//
// kdtree_build_tree: the best-first tree of each request (kdtree/include/kdtree/build.h).
//   log_probs     [batch, positions, top_k]        fp32; of each position's likeliest tokens, likeliest first
//   token_ids     [batch, positions, top_k]        int64
//   roots         [batch]                          int64; the last committed token
//   spine         bool                             the path of the likeliest tokens goes in before all else
//   min_log_prob  float                            the search ends at the first node that scores less
//   tokens        [batch, width]                   int64, written; width, 1 to 256, is the budget, root included
//   parents       [batch, width]                   int32, written; -1 of the root and of padding
//   depths        [batch, width]                   int32, written; 0 of padding
//   tree_mask     [batch * width, ceil(width/32)]  int32, written: as kdtree_mla_verify takes it
//   next_token    [batch, width]                   int64, written; a node's first child, or -1
//   next_sibling  [batch, width]                   int64, written; its parent's next child, or -1
//   counts        [batch]                          int32, written; nodes, root included. Rows from there on are padding
//                                                  that sees itself alone and that no link leads to
//
// kdtree_accept: the walk along the target's own choices (kdtree/include/kdtree/accept.h).
//   tokens, next_token, next_sibling               as above
//   drawn         [batch, width]                   int64; the token that the target chose after each node
//   paths         [batch, limit]                   int32, written; the accepted nodes, root first, then -1
//   counts        [batch]                          int32, written; accepted nodes, at most `limit`
//   bonus         [batch]                          int64, written; the token after the last of them
//
// kdtree_move_rows: moves the accepted nodes' cache rows to the front of their request's slots, in every layer.
//   caches        [layers]                         int64; the addresses of the layers' caches, all of which it writes
//   row_bytes     int                              of a slot in a cache; a multiple of 16
//   slots         [batch, width]                   int64; the slot of each node
//   paths         [batch, limit]                   int32; as kdtree_accept writes them: node paths[b, i] goes to the
//                                                  slot of node i. Ascending, so that paths[b, i] >= i
//   counts        [batch]                          int32; how many of a path to move
// clang-format on
#pragma once

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "../tensor_view.h"

namespace kdtree {

constexpr int64_t kMaxTreeWidth = 256;

constexpr const char* kBuildTreeSchema =
    "kdtree_build_tree(Tensor log_probs, Tensor token_ids, Tensor roots, bool spine, float min_log_prob, "
    "Tensor(a!) tokens, Tensor(b!) parents, Tensor(c!) depths, Tensor(d!) tree_mask, Tensor(e!) next_token, "
    "Tensor(f!) next_sibling, Tensor(g!) counts) -> ()";

constexpr const char* kAcceptSchema =
    "kdtree_accept(Tensor tokens, Tensor next_token, Tensor next_sibling, Tensor drawn, Tensor(a!) paths, "
    "Tensor(b!) counts, Tensor(c!) bonus) -> ()";

constexpr int64_t kMaxTopK = 256;

constexpr const char* kTopKSchema =
    "kdtree_top_k(Tensor logits, int first_id, Tensor(a!) log_probs, Tensor(b!) token_ids, Tensor(c!) normalisers) -> "
    "()";

constexpr const char* kMoveRowsSchema =
    "kdtree_move_rows(Tensor caches, int row_bytes, Tensor slots, Tensor paths, Tensor counts) -> ()";

struct TopKArguments {
  TensorView logits, log_probs, token_ids, normalisers;
};

struct MoveArguments {
  TensorView caches;
  int64_t row_bytes;
  TensorView slots, paths, counts;
};

struct BuildArguments {
  TensorView log_probs, token_ids, roots;
  double min_log_prob;
  TensorView tokens, parents, depths, tree_mask, next_token, next_sibling, counts;

  int64_t batch() const { return roots.sizes[0]; }
  int64_t width() const { return tokens.sizes[1]; }
  int64_t words() const { return (width() + 31) / 32; }
};

struct AcceptArguments {
  TensorView tokens, next_token, next_sibling, drawn, paths, counts, bonus;

  int64_t batch() const { return tokens.sizes[0]; }
  int64_t width() const { return tokens.sizes[1]; }
};

inline bool is(const TensorView& view, Type type, std::initializer_list<int64_t> sizes) {
  return view.type == type && view.dims == static_cast<int64_t>(sizes.size()) && view.contiguous() &&
         std::equal(sizes.begin(), sizes.end(), view.sizes.begin());
}

inline void check_shape_of(
    const char* op, const char* name, const TensorView& view, Type type, std::initializer_list<int64_t> sizes) {
  std::ostringstream shape;
  for (const int64_t size : sizes) shape << (shape.tellp() > 0 ? ", " : "") << size;
  require_for(op, is(view, type, sizes), name, " must be contiguous ", name_of(type), " [", shape.str(), "], is ",
              view);
}

inline void check_tokens(const char* op, const TensorView& tokens) {
  require_for(op, tokens.dims == 2 && tokens.sizes[1] >= 1 && tokens.sizes[1] <= kMaxTreeWidth,
              "tokens must be [batch, width] with a width of 1 to ", kMaxTreeWidth, ", is ", tokens);
}

// Raises unless every argument is as the table above says.
inline void check_arguments(const BuildArguments& a) {
  constexpr const char* op = "kdtree_build_tree";
  require_for(op, a.roots.dims == 1, "roots must be [batch], is ", a.roots);
  const int64_t batch = a.batch();
  require_for(op, a.log_probs.dims == 3 && a.log_probs.sizes[0] == batch, "log_probs must be [", batch,
              ", positions, top_k], is ", a.log_probs);
  require_for(op, !std::isnan(a.min_log_prob), "min_log_prob is NaN");
  check_tokens(op, a.tokens);
  const int64_t positions = a.log_probs.sizes[1], top_k = a.log_probs.sizes[2], width = a.width();
  check_shape_of(op, "roots", a.roots, Type::int64, {batch});
  check_shape_of(op, "log_probs", a.log_probs, Type::fp32, {batch, positions, top_k});
  check_shape_of(op, "token_ids", a.token_ids, Type::int64, {batch, positions, top_k});
  check_shape_of(op, "tokens", a.tokens, Type::int64, {batch, width});
  check_shape_of(op, "parents", a.parents, Type::int32, {batch, width});
  check_shape_of(op, "depths", a.depths, Type::int32, {batch, width});
  check_shape_of(op, "tree_mask", a.tree_mask, Type::int32, {batch * width, a.words()});
  check_shape_of(op, "next_token", a.next_token, Type::int64, {batch, width});
  check_shape_of(op, "next_sibling", a.next_sibling, Type::int64, {batch, width});
  check_shape_of(op, "counts", a.counts, Type::int32, {batch});
}

inline void check_arguments(const AcceptArguments& a) {
  constexpr const char* op = "kdtree_accept";
  check_tokens(op, a.tokens);
  const int64_t batch = a.batch(), width = a.width();
  require_for(op, a.paths.dims == 2 && a.paths.sizes[1] >= 1, "paths must be [", batch, ", 1 or more], is ", a.paths);
  check_shape_of(op, "tokens", a.tokens, Type::int64, {batch, width});
  check_shape_of(op, "next_token", a.next_token, Type::int64, {batch, width});
  check_shape_of(op, "next_sibling", a.next_sibling, Type::int64, {batch, width});
  check_shape_of(op, "drawn", a.drawn, Type::int64, {batch, width});
  check_shape_of(op, "paths", a.paths, Type::int32, {batch, a.paths.sizes[1]});
  check_shape_of(op, "counts", a.counts, Type::int32, {batch});
  check_shape_of(op, "bonus", a.bonus, Type::int64, {batch});
}

inline void check_arguments(const TopKArguments& a) {
  constexpr const char* op = "kdtree_top_k";
  const bool of_type = a.logits.type == Type::fp32 || a.logits.type == Type::bf16 || a.logits.type == Type::fp16;
  require_for(op, of_type && a.logits.dims == 2 && a.logits.contiguous() && a.logits.sizes[1] <= INT32_MAX,
              "logits must be contiguous float32, bfloat16 or float16 [rows, vocabulary], is ", a.logits);
  const int64_t rows = a.logits.sizes[0], most = std::min(kMaxTopK, a.logits.sizes[1]);
  require_for(op, a.log_probs.dims == 2 && a.log_probs.sizes[1] >= 1 && a.log_probs.sizes[1] <= most,
              "log_probs must be [", rows, ", 1 to ", most, "], is ", a.log_probs);
  const int64_t top_k = a.log_probs.sizes[1];
  check_shape_of(op, "log_probs", a.log_probs, Type::fp32, {rows, top_k});
  check_shape_of(op, "token_ids", a.token_ids, Type::int64, {rows, top_k});
  check_shape_of(op, "normalisers", a.normalisers, Type::fp32, {rows});
}

inline void check_arguments(const MoveArguments& a) {
  constexpr const char* op = "kdtree_move_rows";
  require_for(op, a.caches.dims == 1, "caches must be [layers], is ", a.caches);
  check_shape_of(op, "caches", a.caches, Type::int64, {a.caches.sizes[0]});
  require_for(op, a.row_bytes > 0 && a.row_bytes % 16 == 0, "row_bytes must be a multiple of 16, is ", a.row_bytes);
  require_for(op, a.slots.dims == 2, "slots must be [batch, width], is ", a.slots);
  const int64_t batch = a.slots.sizes[0], width = a.slots.sizes[1];
  check_shape_of(op, "slots", a.slots, Type::int64, {batch, width});
  require_for(op, a.paths.dims == 2 && a.paths.sizes[1] <= width, "paths must be [", batch, ", at most ", width,
              "], is ", a.paths);
  check_shape_of(op, "paths", a.paths, Type::int32, {batch, a.paths.sizes[1]});
  check_shape_of(op, "counts", a.counts, Type::int32, {batch});
}

}  // namespace kdtree
