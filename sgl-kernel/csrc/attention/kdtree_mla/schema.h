// SPDX-License-Identifier: Apache-2.0
// The op's schema and what it asks of its arguments, the same for every device and every binding of torch.
//
// clang-format off
//   q            [T, heads, 576]        bf16, fp16, or fp32 (CPU only); absorbed query: 512 latent, then 64 rope;
//                                       T = batch * width
//   kv_cache     [slots, 1, 576]        q's type; the rows of one layer
//   slot_table   [rows, columns]        int32; slot = slot_table[row, position / page] * page + position % page
//   table_rows   [batch]                int64; the row of slot_table that a request has
//   page         int                    1 where the table holds a slot a token (SGLang's req_to_token)
//   prefix_lens  [batch]                int32 or int64; committed tokens. The request's `width` draft tokens stand at
//                                       positions prefix_len .. prefix_len + width - 1. Below 0: no such request
//                                       (a padded row)
//   tree_mask    [T, ceil(width / 32)]  int32 bit words, or None for a causal chain: bit j of row i = node i sees node j
//   sm_scale     float                  of the scores
//   k_scale      float                  the cache holds K / k_scale
//   out          [T, heads, 512]        q's type, written
//   lse          [T, heads]             fp32 or None, written: natural log of the sum of exp(score)
//   workspace    [bytes]                uint8: the splits' partial results. CUDA: at least
//                                       kdtree_mla_workspace_bytes(heads, width, device). CPU: None, it makes its own
// clang-format on
//
// A row that sees nothing gives 0 and lse = -inf.
#pragma once

#include <cstdint>
#include <optional>

#include "../../tensor_view.h"

namespace kdtree {

constexpr int64_t kMaxHeads = 128;
constexpr int64_t kMaxWidth = 256;

constexpr const char* kVerifySchema =
    "kdtree_mla_verify(Tensor q, Tensor kv_cache, Tensor slot_table, Tensor table_rows, int page, Tensor prefix_lens, "
    "Tensor? tree_mask, float sm_scale, float k_scale, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? workspace) -> ()";

struct VerifyArguments {
  TensorView q, kv_cache, slot_table, table_rows;
  int64_t page;
  TensorView prefix_lens;
  std::optional<TensorView> tree_mask;
  double sm_scale, k_scale;
  TensorView out;
  std::optional<TensorView> lse, workspace;

  int64_t batch() const { return table_rows.sizes[0]; }
  int64_t heads() const { return q.sizes[1]; }
  // Draft tokens a request.
  int64_t width() const { return batch() == 0 ? 0 : q.sizes[0] / batch(); }
};

template <class... Parts>
void require(bool ok, const Parts&... parts) {
  require_for("kdtree_mla_verify", ok, parts...);
}

// Raises unless every argument is as the table above says. What a device asks beyond it, its own code checks.
inline void check_arguments(const VerifyArguments& a) {
  require(a.table_rows.dims == 1 && a.table_rows.type == Type::int64, "table_rows must be int64 [batch], is ",
          a.table_rows);
  const int64_t batch = a.batch();
  require(a.q.dims == 3 && a.q.sizes[2] == 576 && a.heads() >= 1 && a.heads() <= kMaxHeads,
          "q must be [batch * width, heads, 576] with 1 to ", kMaxHeads, " heads, is ", a.q);
  require(batch == 0 ? a.q.sizes[0] == 0 : a.q.sizes[0] % batch == 0, "q must have batch * width rows, is ", a.q,
          " for a batch of ", batch, " (table_rows)");
  const int64_t width = a.width();
  require(batch == 0 || (width >= 1 && width <= kMaxWidth), "width (rows of q over batch) must be 1 to ", kMaxWidth,
          ", is ", width, ": q ", a.q, ", batch ", batch);
  require(a.kv_cache.dims == 3 && a.kv_cache.sizes[1] == 1 && a.kv_cache.sizes[2] == 576 && a.kv_cache.strides[2] == 1,
          "kv_cache must be [slots, 1, 576] with a contiguous last dimension, is ", a.kv_cache);
  require(a.kv_cache.type == a.q.type, "kv_cache must have q's type, is ", a.kv_cache, " for q ", a.q);
  require(a.slot_table.dims == 2 && a.slot_table.type == Type::int32 && a.slot_table.strides[1] == 1,
          "slot_table must be int32 [rows, columns] with contiguous rows, is ", a.slot_table);
  require(a.page >= 1, "page must be 1 or more, is ", a.page);
  require(a.prefix_lens.dims == 1 && a.prefix_lens.sizes[0] == batch &&
              (a.prefix_lens.type == Type::int32 || a.prefix_lens.type == Type::int64),
          "prefix_lens must be int32 or int64 [", batch, "], is ", a.prefix_lens);
  if (a.tree_mask.has_value()) {
    const int64_t words = (width + 31) / 32;
    require(a.tree_mask->dims == 2 && a.tree_mask->type == Type::int32 && a.tree_mask->sizes[0] == a.q.sizes[0] &&
                a.tree_mask->sizes[1] == words && a.tree_mask->contiguous(),
            "tree_mask must be contiguous int32 [", a.q.sizes[0], ", ", words, "] (rows of q, ceil(width / 32)), is ",
            *a.tree_mask);
  }
  require(a.out.dims == 3 && a.out.sizes[0] == a.q.sizes[0] && a.out.sizes[1] == a.q.sizes[1] &&
              a.out.sizes[2] == 512 && a.out.contiguous() && a.out.type == a.q.type,
          "out must be contiguous ", name_of(a.q.type), " [", a.q.sizes[0], ", ", a.q.sizes[1], ", 512], is ", a.out);
  if (a.lse.has_value()) {
    require(a.lse->dims == 2 && a.lse->sizes[0] == a.q.sizes[0] && a.lse->sizes[1] == a.q.sizes[1] &&
                a.lse->contiguous() && a.lse->type == Type::fp32,
            "lse must be contiguous float32 [", a.q.sizes[0], ", ", a.q.sizes[1], "], is ", *a.lse);
  }
}

}  // namespace kdtree
