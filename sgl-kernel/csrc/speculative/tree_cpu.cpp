// SPDX-License-Identifier: Apache-2.0
// The ops of draft trees on the CPU: the headers of kdtree/, a request at a time.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <kdtree/accept.h>
#include <kdtree/build.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "../cpu/view.h"
#include "tree_schema.h"

namespace kdtree {
namespace {

void build_tree_meta(const at::Tensor& log_probs,
                     const at::Tensor& token_ids,
                     const at::Tensor& roots,
                     bool /*spine*/,
                     double min_log_prob,
                     at::Tensor tokens,
                     at::Tensor parents,
                     at::Tensor depths,
                     at::Tensor tree_mask,
                     at::Tensor next_token,
                     at::Tensor next_sibling,
                     at::Tensor counts) {
  check_arguments(BuildArguments{view(log_probs), view(token_ids), view(roots), min_log_prob, view(tokens),
                                 view(parents), view(depths), view(tree_mask), view(next_token), view(next_sibling),
                                 view(counts)});
}

void build_tree_cpu(const at::Tensor& log_probs,
                    const at::Tensor& token_ids,
                    const at::Tensor& roots,
                    bool spine,
                    double min_log_prob,
                    at::Tensor tokens,
                    at::Tensor parents,
                    at::Tensor depths,
                    at::Tensor tree_mask,
                    at::Tensor next_token,
                    at::Tensor next_sibling,
                    at::Tensor counts) {
  build_tree_meta(log_probs, token_ids, roots, spine, min_log_prob, tokens, parents, depths, tree_mask, next_token,
                  next_sibling, counts);
  const int64_t width = tokens.size(1);
  const int64_t words = tree_mask.size(1);
  const int64_t drafted = log_probs.size(1) * log_probs.size(2);
  at::parallel_for(0, roots.size(0), 4, [&](int64_t begin, int64_t end) {
    std::vector<int32_t> ranks(width);
    for (int64_t b = begin; b < end; ++b) {
      const Drafted draft{static_cast<int>(log_probs.size(1)), static_cast<int>(log_probs.size(2)),
                          log_probs.const_data_ptr<float>() + b * drafted,
                          token_ids.const_data_ptr<int64_t>() + b * drafted};
      const Tree tree{static_cast<int>(width),
                      static_cast<int>(words),
                      tokens.mutable_data_ptr<int64_t>() + b * width,
                      parents.mutable_data_ptr<int32_t>() + b * width,
                      depths.mutable_data_ptr<int32_t>() + b * width,
                      ranks.data(),
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
  check_arguments(AcceptArguments{view(tokens), view(next_token), view(next_sibling), view(drawn), view(paths),
                                  view(counts), view(bonus)});
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

void top_k_meta(const at::Tensor& logits,
                int64_t /*first_id*/,
                at::Tensor log_probs,
                at::Tensor token_ids,
                at::Tensor normalisers) {
  check_arguments(TopKArguments{view(logits), view(log_probs), view(token_ids), view(normalisers)});
}

void top_k_cpu(
    const at::Tensor& logits, int64_t first_id, at::Tensor log_probs, at::Tensor token_ids, at::Tensor normalisers) {
  top_k_meta(logits, first_id, log_probs, token_ids, normalisers);
  const at::Tensor in_fp32 = logits.to(at::kFloat);
  const int64_t vocabulary = logits.size(1), top_k = log_probs.size(1);
  at::parallel_for(0, logits.size(0), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> row(vocabulary);
    std::vector<int32_t> order(vocabulary);
    for (int64_t r = begin; r < end; ++r) {
      const float* given = in_fp32.const_data_ptr<float>() + r * vocabulary;
      for (int64_t i = 0; i < vocabulary; ++i) row[i] = std::isnan(given[i]) ? -HUGE_VALF : given[i];
      std::iota(order.begin(), order.end(), 0);
      std::partial_sort(order.begin(), order.begin() + top_k, order.end(),
                        [&](int32_t a, int32_t b) { return row[a] != row[b] ? row[a] > row[b] : a < b; });
      const float largest = row[order[0]];
      double sum = 0;
      for (const float logit : row) sum += std::exp(static_cast<double>(logit) - largest);
      const float normaliser = largest > -HUGE_VALF ? static_cast<float>(largest + std::log(sum)) : -HUGE_VALF;
      normalisers.mutable_data_ptr<float>()[r] = normaliser;
      for (int64_t i = 0; i < top_k; ++i) {
        const float logit = row[order[i]];
        log_probs.mutable_data_ptr<float>()[r * top_k + i] = logit > -HUGE_VALF ? logit - normaliser : -HUGE_VALF;
        token_ids.mutable_data_ptr<int64_t>()[r * top_k + i] = first_id + order[i];
      }
    }
  });
}

void move_rows_meta(const at::Tensor& caches,
                    int64_t row_bytes,
                    const at::Tensor& slots,
                    const at::Tensor& paths,
                    const at::Tensor& counts) {
  check_arguments(MoveArguments{view(caches), row_bytes, view(slots), view(paths), view(counts)});
}

void move_rows_cpu(const at::Tensor& caches,
                   int64_t row_bytes,
                   const at::Tensor& slots,
                   const at::Tensor& paths,
                   const at::Tensor& counts) {
  move_rows_meta(caches, row_bytes, slots, paths, counts);
  const int64_t width = slots.size(1), limit = paths.size(1);
  for (int64_t layer = 0; layer < caches.size(0); ++layer) {
    char* cache = reinterpret_cast<char*>(caches.const_data_ptr<int64_t>()[layer]);
    for (int64_t b = 0; b < slots.size(0); ++b) {
      const int64_t* slot = slots.const_data_ptr<int64_t>() + b * width;
      const int32_t* path = paths.const_data_ptr<int32_t>() + b * limit;
      for (int32_t i = 0; i < counts.const_data_ptr<int32_t>()[b]; ++i) {
        if (path[i] != i) std::memcpy(cache + slot[i] * row_bytes, cache + slot[path[i]] * row_bytes, row_bytes);
      }
    }
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {
  m.def(kBuildTreeSchema);
  m.def(kAcceptSchema);
  m.def(kTopKSchema);
  m.def(kMoveRowsSchema);
}

TORCH_LIBRARY_IMPL(sgl_kernel, CPU, m) {
  m.impl("kdtree_build_tree", build_tree_cpu);
  m.impl("kdtree_accept", accept_cpu);
  m.impl("kdtree_top_k", top_k_cpu);
  m.impl("kdtree_move_rows", move_rows_cpu);
}

// The ops only write their arguments, so checking them is all that a fake implementation has to do.
TORCH_LIBRARY_IMPL(sgl_kernel, Meta, m) {
  m.impl("kdtree_build_tree", build_tree_meta);
  m.impl("kdtree_accept", accept_meta);
  m.impl("kdtree_top_k", top_k_meta);
  m.impl("kdtree_move_rows", move_rows_meta);
}

}  // namespace kdtree
