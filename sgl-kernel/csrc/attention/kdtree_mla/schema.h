// SPDX-License-Identifier: Apache-2.0
// The op's schema and what it asks of its arguments, the same for every device.
//
//   q            [T, heads, 576]   bf16, fp16, or fp32 (CPU only); absorbed query: 512 latent, then 64 rope; T = batch
//   * width kv_cache     [slots, 1, 576]   q's type; the rows of one layer slot_table   [rows, columns]   int32; slot =
//   slot_table[row, position / page] * page + position % page table_rows   [batch]           int64; the row of
//   slot_table that a request has page         int               1 where the table holds a slot a token (SGLang's
//   req_to_token) prefix_lens  [batch]           int32 or int64; committed tokens. The request's `width` draft tokens
//   stand at positions
//                                  prefix_len .. prefix_len + width - 1. Below 0: no such request (a padded row)
//   tree_mask    [T, ceil(width / 32)]  int32 bit words, or None for a causal chain: bit j of row i = node i sees node
//   j sm_scale     float             of the scores k_scale      float             the cache holds K / k_scale out [T,
//   heads, 512]   q's type, written lse          [T, heads]        fp32 or None, written: natural log of the sum of
//   exp(score) workspace    bytes for the partial results of the splits, or None (CUDA needs it; the CPU op makes its
//   own)
//
// A row that sees nothing gives 0 and lse = -inf.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <optional>

namespace kdtree {

constexpr int64_t kMaxHeads = 128;
constexpr int64_t kMaxWidth = 256;

constexpr const char* kVerifySchema =
    "kdtree_mla_verify(Tensor q, Tensor kv_cache, Tensor slot_table, Tensor table_rows, int page, Tensor prefix_lens, "
    "Tensor? tree_mask, float sm_scale, float k_scale, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? workspace) -> ()";

// Draft tokens a request.
inline int64_t width_of(const at::Tensor& q, const at::Tensor& table_rows) {
  const int64_t batch = table_rows.size(0);
  return batch == 0 ? 0 : q.size(0) / batch;
}

inline void check_verify_arguments(const at::Tensor& q,
                                   const at::Tensor& kv_cache,
                                   const at::Tensor& slot_table,
                                   const at::Tensor& table_rows,
                                   int64_t page,
                                   const at::Tensor& prefix_lens,
                                   const std::optional<at::Tensor>& tree_mask,
                                   const at::Tensor& out,
                                   const std::optional<at::Tensor>& lse) {
#define KDTREE_CHECK(ok, ...) TORCH_CHECK(ok, "kdtree_mla_verify: ", __VA_ARGS__)
  KDTREE_CHECK(table_rows.dim() == 1 && table_rows.scalar_type() == at::kLong, "table_rows must be int64 [batch], is ",
               table_rows.scalar_type(), " ", table_rows.sizes());
  const int64_t batch = table_rows.size(0);
  KDTREE_CHECK(q.dim() == 3 && q.size(2) == 576 && q.size(1) >= 1 && q.size(1) <= kMaxHeads,
               "q must be [batch * width, heads, 576] with 1 to ", kMaxHeads, " heads, is ", q.sizes());
  KDTREE_CHECK(batch == 0 ? q.size(0) == 0 : q.size(0) % batch == 0, "q must have batch * width rows, is ", q.sizes(),
               " for a batch of ", batch, " (table_rows)");
  const int64_t width = width_of(q, table_rows);
  KDTREE_CHECK(batch == 0 || (width >= 1 && width <= kMaxWidth), "width (rows of q over batch) must be 1 to ",
               kMaxWidth, ", is ", width, ": q ", q.sizes(), ", batch ", batch);
  KDTREE_CHECK(kv_cache.dim() == 3 && kv_cache.size(1) == 1 && kv_cache.size(2) == 576 && kv_cache.stride(2) == 1,
               "kv_cache must be [slots, 1, 576] with a contiguous last dimension, is ", kv_cache.sizes());
  KDTREE_CHECK(kv_cache.scalar_type() == q.scalar_type(), "kv_cache must have q's type, is ", kv_cache.scalar_type(),
               " for q ", q.scalar_type());
  KDTREE_CHECK(slot_table.dim() == 2 && slot_table.scalar_type() == at::kInt && slot_table.stride(1) == 1,
               "slot_table must be int32 [rows, columns] with contiguous rows, is ", slot_table.scalar_type(), " ",
               slot_table.sizes());
  KDTREE_CHECK(page >= 1, "page must be 1 or more, is ", page);
  KDTREE_CHECK(prefix_lens.dim() == 1 && prefix_lens.size(0) == batch &&
                   (prefix_lens.scalar_type() == at::kInt || prefix_lens.scalar_type() == at::kLong),
               "prefix_lens must be int32 or int64 [", batch, "], is ", prefix_lens.scalar_type(), " ",
               prefix_lens.sizes());
  if (tree_mask.has_value()) {
    const int64_t words = (width + 31) / 32;
    KDTREE_CHECK(tree_mask->dim() == 2 && tree_mask->scalar_type() == at::kInt && tree_mask->size(0) == q.size(0) &&
                     tree_mask->size(1) == words && tree_mask->is_contiguous(),
                 "tree_mask must be contiguous int32 [", q.size(0), ", ", words, "] (rows of q, ceil(width / 32)), is ",
                 tree_mask->scalar_type(), " ", tree_mask->sizes());
  }
  KDTREE_CHECK(out.dim() == 3 && out.size(0) == q.size(0) && out.size(1) == q.size(1) && out.size(2) == 512 &&
                   out.is_contiguous() && out.scalar_type() == q.scalar_type(),
               "out must be contiguous ", q.scalar_type(), " [", q.size(0), ", ", q.size(1), ", 512], is ",
               out.scalar_type(), " ", out.sizes());
  if (lse.has_value()) {
    KDTREE_CHECK(lse->dim() == 2 && lse->size(0) == q.size(0) && lse->size(1) == q.size(1) && lse->is_contiguous() &&
                     lse->scalar_type() == at::kFloat,
                 "lse must be contiguous float32 [", q.size(0), ", ", q.size(1), "], is ", lse->scalar_type(), " ",
                 lse->sizes());
  }
#undef KDTREE_CHECK
}

}  // namespace kdtree
