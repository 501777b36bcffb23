// SPDX-License-Identifier: Apache-2.0
// What the host hands to the kernels of draft trees, and how it launches them. Tensors as in tree_schema.h.
#pragma once

#include <cstdint>

namespace kdtree {

struct BuildParams {
  const float* log_probs;
  const int64_t* token_ids;
  const int64_t* roots;
  bool spine;
  double min_log_prob;
  int64_t* tokens;
  int32_t* parents;
  int32_t* depths;
  uint32_t* tree_mask;
  int64_t* next_token;
  int64_t* next_sibling;
  int32_t* counts;
  int32_t batch, positions, top_k, width, words;
};

struct AcceptParams {
  const int64_t* tokens;
  const int64_t* next_token;
  const int64_t* next_sibling;
  const int64_t* drawn;
  int32_t* paths;
  int32_t* counts;
  int64_t* bonus;
  int32_t batch, width, limit;
};

struct TopKParams {
  const void* logits;
  int64_t first_id;
  float* log_probs;
  int64_t* token_ids;
  float* normalisers;
  int32_t rows, vocabulary, top_k;
};

struct MoveParams {
  const int64_t* caches;
  const int64_t* slots;
  const int32_t* paths;
  const int32_t* counts;
  int32_t layers, batch, width, limit, row_bytes;
};

enum class LogitType { fp32, bf16, fp16 };

// Put the kernel into a stream (cudaStream_t) of the current device. No allocation, no synchronisation.
void launch_build_tree(const BuildParams& params, void* stream);
void launch_accept(const AcceptParams& params, void* stream);
void launch_top_k(LogitType type, const TopKParams& params, void* stream);
void launch_move_rows(const MoveParams& params, void* stream);

}  // namespace kdtree
