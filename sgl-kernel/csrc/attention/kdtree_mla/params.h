// SPDX-License-Identifier: Apache-2.0
// What the host hands to the two kernels.
#pragma once

#include <cstdint>

#include "tiles.h"

namespace kdtree {

struct VerifyParams {
  // Query: element [token, head, column] at token * q_token_stride + head * q_head_stride + column. 4-byte aligned.
  const void* q;
  int64_t q_token_stride, q_head_stride;

  // Keys: the row of slot s at s * kv_stride_bytes. 16-byte aligned.
  const char* kv;
  int64_t kv_stride_bytes;

  const int32_t* slot_table;
  int64_t slot_table_stride;
  const int64_t* table_rows;
  int32_t page;
  const void* prefix_lens;
  bool prefix_lens_are_64_bit;

  const uint32_t* tree_mask;  // null: a causal chain
  int32_t mask_words;         // a row

  float scale_log2;  // of a score, so that its exponential is one of 2
  float k_scale;     // of the values

  void* out;
  float* lse;  // null: not wanted

  int32_t batch, width, heads;
  int32_t rows;        // a request: width * heads, token by token
  int32_t row_blocks;  // a request: blocks of Tile::kRows rows
  int32_t groups;      // of blocks; each takes an equal share of all keys, see schedule.cuh

  // Partial results of the segments that do not hold all keys of their request:
  // fp32 [groups, 2, row_blocks * Tile::kRows] times kLatent columns, a sum and a peak.
  float* partial_out;
  float* partial_sum;
  float* partial_peak;
};

}  // namespace kdtree
