// SPDX-License-Identifier: Apache-2.0
// The ops of draft trees, the same for every device.
//
// clang-format off
// kdtree_build_tree: the best-first tree of each request (kdtree/include/kdtree/build.h).
//   log_probs     [batch, positions, top_k]        fp32; of each position's likeliest tokens, likeliest first
//   token_ids     [batch, positions, top_k]        int64
//   roots         [batch]                          int64; the last committed token
//   spine         bool                             the path of the likeliest tokens goes in before all else
//   min_log_prob  float                            the search ends at the first node that scores less
//   tokens        [batch, width]                   int64, written; width, 1 to 256, is the budget, root included
//   parents       [batch, width]                   int32, written; -1 of the root and of padding
//   depths        [batch, width]                   int32, written; 0 of padding
//   ranks         [batch, width]                   int32, written; of a node among its position's tokens
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
// clang-format on
#pragma once

namespace kdtree {

constexpr int kMaxTreeWidth = 256;

constexpr const char* kBuildTreeSchema =
    "kdtree_build_tree(Tensor log_probs, Tensor token_ids, Tensor roots, bool spine, float min_log_prob, "
    "Tensor(a!) tokens, Tensor(b!) parents, Tensor(c!) depths, Tensor(d!) ranks, Tensor(e!) tree_mask, "
    "Tensor(f!) next_token, Tensor(g!) next_sibling, Tensor(h!) counts) -> ()";

constexpr const char* kAcceptSchema =
    "kdtree_accept(Tensor tokens, Tensor next_token, Tensor next_sibling, Tensor drawn, Tensor(a!) paths, "
    "Tensor(b!) counts, Tensor(c!) bonus) -> ()";

}  // namespace kdtree
