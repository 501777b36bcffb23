// SPDX-License-Identifier: Apache-2.0
// The ops of draft trees on the CPU: the headers of kdtree/, a request at a time.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <kdtree/accept.h>
#include <kdtree/build.h>
#include <torch/library.h>

#include "tree_schema.h"

namespace kdtree {
namespace {

void check(const char* op, const char* name, const at::Tensor& t, at::ScalarType type, at::IntArrayRef sizes) {
  TORCH_CHECK(t.scalar_type() == type && t.sizes() == sizes && t.is_contiguous(), op, ": ", name,
              " must be contiguous ", type, " ", sizes, ", is ", t.is_contiguous() ? "" : "not contiguous ",
              t.scalar_type(), " ", t.sizes());
}

void build_tree_meta(const at::Tensor& log_probs,
                     const at::Tensor& token_ids,
                     const at::Tensor& roots,
                     bool /*spine*/,
                     double min_log_prob,
                     at::Tensor tokens,
                     at::Tensor parents,
                     at::Tensor depths,
                     at::Tensor ranks,
                     at::Tensor tree_mask,
                     at::Tensor next_token,
                     at::Tensor next_sibling,
                     at::Tensor counts) {
  const char* op = "kdtree_build_tree";
  TORCH_CHECK(roots.dim() == 1, op, ": roots must be [batch], is ", roots.sizes());
  const int64_t batch = roots.size(0);
  TORCH_CHECK(log_probs.dim() == 3 && log_probs.size(0) == batch, op, ": log_probs must be [", batch,
              ", positions, top_k], is ", log_probs.sizes());
  TORCH_CHECK(tokens.dim() == 2 && tokens.size(1) >= 1 && tokens.size(1) <= kMaxTreeWidth, op,
              ": tokens must be [batch, width] with a width of 1 to ", kMaxTreeWidth, ", is ", tokens.sizes());
  TORCH_CHECK(min_log_prob == min_log_prob, op, ": min_log_prob is NaN");
  const int64_t width = tokens.size(1);
  check(op, "roots", roots, at::kLong, {batch});
  check(op, "log_probs", log_probs, at::kFloat, log_probs.sizes());
  check(op, "token_ids", token_ids, at::kLong, log_probs.sizes());
  check(op, "tokens", tokens, at::kLong, {batch, width});
  check(op, "parents", parents, at::kInt, {batch, width});
  check(op, "depths", depths, at::kInt, {batch, width});
  check(op, "ranks", ranks, at::kInt, {batch, width});
  check(op, "tree_mask", tree_mask, at::kInt, {batch * width, (width + 31) / 32});
  check(op, "next_token", next_token, at::kLong, {batch, width});
  check(op, "next_sibling", next_sibling, at::kLong, {batch, width});
  check(op, "counts", counts, at::kInt, {batch});
}

void build_tree_cpu(const at::Tensor& log_probs,
                    const at::Tensor& token_ids,
                    const at::Tensor& roots,
                    bool spine,
                    double min_log_prob,
                    at::Tensor tokens,
                    at::Tensor parents,
                    at::Tensor depths,
                    at::Tensor ranks,
                    at::Tensor tree_mask,
                    at::Tensor next_token,
                    at::Tensor next_sibling,
                    at::Tensor counts) {
  build_tree_meta(log_probs, token_ids, roots, spine, min_log_prob, tokens, parents, depths, ranks, tree_mask,
                  next_token, next_sibling, counts);
  const int64_t width = tokens.size(1);
  const int64_t words = tree_mask.size(1);
  const int64_t drafted = log_probs.size(1) * log_probs.size(2);
  at::parallel_for(0, roots.size(0), 4, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const Drafted draft{static_cast<int>(log_probs.size(1)), static_cast<int>(log_probs.size(2)),
                          log_probs.const_data_ptr<float>() + b * drafted,
                          token_ids.const_data_ptr<int64_t>() + b * drafted};
      const Tree tree{static_cast<int>(width),
                      static_cast<int>(words),
                      tokens.mutable_data_ptr<int64_t>() + b * width,
                      parents.mutable_data_ptr<int32_t>() + b * width,
                      depths.mutable_data_ptr<int32_t>() + b * width,
                      ranks.mutable_data_ptr<int32_t>() + b * width,
                      reinterpret_cast<uint32_t*>(tree_mask.mutable_data_ptr<int32_t>()) + b * width * words,
                      next_token.mutable_data_ptr<int64_t>() + b * width,
                      next_sibling.mutable_data_ptr<int64_t>() + b * width};
      counts.mutable_data_ptr<int32_t>()[b] =
          build_tree(draft, roots.const_data_ptr<int64_t>()[b], {spine, min_log_prob}, tree);
    }
  });
}

void accept_meta(const at::Tensor& tokens,
                 const at::Tensor& next_token,
                 const at::Tensor& next_sibling,
                 const at::Tensor& drawn,
                 at::Tensor paths,
                 at::Tensor counts,
                 at::Tensor bonus) {
  const char* op = "kdtree_accept";
  TORCH_CHECK(tokens.dim() == 2 && tokens.size(1) >= 1 && tokens.size(1) <= kMaxTreeWidth, op,
              ": tokens must be [batch, width] with a width of 1 to ", kMaxTreeWidth, ", is ", tokens.sizes());
  const int64_t batch = tokens.size(0);
  TORCH_CHECK(paths.dim() == 2 && paths.size(1) >= 1, op, ": paths must be [", batch, ", 1 or more], is ",
              paths.sizes());
  check(op, "tokens", tokens, at::kLong, tokens.sizes());
  check(op, "next_token", next_token, at::kLong, tokens.sizes());
  check(op, "next_sibling", next_sibling, at::kLong, tokens.sizes());
  check(op, "drawn", drawn, at::kLong, tokens.sizes());
  check(op, "paths", paths, at::kInt, {batch, paths.size(1)});
  check(op, "counts", counts, at::kInt, {batch});
  check(op, "bonus", bonus, at::kLong, {batch});
}

void accept_cpu(const at::Tensor& tokens,
                const at::Tensor& next_token,
                const at::Tensor& next_sibling,
                const at::Tensor& drawn,
                at::Tensor paths,
                at::Tensor counts,
                at::Tensor bonus) {
  accept_meta(tokens, next_token, next_sibling, drawn, paths, counts, bonus);
  const int64_t width = tokens.size(1);
  const int limit = static_cast<int>(paths.size(1));
  const auto in_tree = [&](const at::Tensor& links) {
    return links.numel() == 0 || (links.ge(-1).all().item<bool>() && links.lt(width).all().item<bool>());
  };
  TORCH_CHECK_INDEX(in_tree(next_token) && in_tree(next_sibling),
                    "kdtree_accept: next_token and next_sibling must be -1 to ", width - 1);
  for (int64_t b = 0; b < tokens.size(0); ++b) {
    const Verified tree{tokens.const_data_ptr<int64_t>() + b * width, next_token.const_data_ptr<int64_t>() + b * width,
                        next_sibling.const_data_ptr<int64_t>() + b * width,
                        drawn.const_data_ptr<int64_t>() + b * width};
    int32_t* path = paths.mutable_data_ptr<int32_t>() + b * limit;
    const int count = accept(tree, limit, path);
    std::fill(path + count, path + limit, -1);
    counts.mutable_data_ptr<int32_t>()[b] = count;
    bonus.mutable_data_ptr<int64_t>()[b] = tree.drawn[path[count - 1]];
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {
  m.def(kBuildTreeSchema);
  m.def(kAcceptSchema);
}

TORCH_LIBRARY_IMPL(sgl_kernel, CPU, m) {
  m.impl("kdtree_build_tree", build_tree_cpu);
  m.impl("kdtree_accept", accept_cpu);
}

// The ops only write their arguments, so checking them is all that a fake implementation has to do.
TORCH_LIBRARY_IMPL(sgl_kernel, Meta, m) {
  m.impl("kdtree_build_tree", build_tree_meta);
  m.impl("kdtree_accept", accept_meta);
}

}  // namespace kdtree
