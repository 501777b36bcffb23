// SPDX-License-Identifier: Apache-2.0
// What crosses between the op (mla_verify.cpp) and its kernels (mla_verify_avx*.cpp): plain data, no torch.
#pragma once

#include <cstdint>

namespace kdtree {

constexpr int kLatent = 512;                  // columns of V, the first of K
constexpr int kHead = 576;                    // columns of K: latent, then rope
constexpr int kTileKeys = 128;                // keys a tile
constexpr int kKeyGroup = 16;                 // a tile's end is worked in groups of so many keys
constexpr int kMaxBlockRows = 96;             // rows (heads x draft tokens) that share a key tile
constexpr int64_t kScratchBytes = 900 << 10;  // what a kernel works in, a thread
constexpr int64_t kSplitKeys = 1024;  // keys a split: fixed, so that a row's result depends on nothing but its request

enum class Storage { fp32, bf16, fp16 };

// One block of rows of one request, over one split of its keys.
struct VerifyTask {
  const char* query;           // first row of the request: token 0, head 0
  int64_t query_token_stride;  // bytes
  int64_t query_head_stride;   // bytes
  const char* kv;
  int64_t kv_stride;     // bytes a slot; 64-bit, as is everything that a slot multiplies
  const int32_t* slots;  // this request's row of slot_table
  int64_t page;
  int64_t prefix;            // committed tokens
  int64_t begin, end;        // keys of this split
  const int32_t* tree_mask;  // this request's first mask row, or null for a causal chain
  int64_t mask_stride;       // words a mask row
  int heads;
  int first_row, rows;  // row = token * heads + head
  float scale;          // sm_scale * k_scale * log2(e)
};

// Unnormalised attention of `rows` rows: sum of 2^(score - peak) * V, with that sum's weights and peak.
struct Partial {
  float* out;   // [rows, kLatent]
  float* peak;  // [rows], base 2; -inf where a row saw nothing
  float* sum;   // [rows]
};

// `scratch`: kScratchBytes, aligned to 64.
using VerifyKernel = void (*)(Storage, const VerifyTask&, void* scratch, Partial&);

void verify_avx512_bf16(Storage storage, const VerifyTask& task, void* scratch, Partial& partial);
void verify_avx2(Storage storage, const VerifyTask& task, void* scratch, Partial& partial);

// These are compiled into every file that uses them, each for its own instruction set: hence static.
static inline const char* query_row(const VerifyTask& task, int row) {
  const int absolute = task.first_row + row;
  return task.query + (absolute / task.heads) * task.query_token_stride +
         (absolute % task.heads) * task.query_head_stride;
}

static inline int64_t slot_of(const VerifyTask& task, int64_t position) {
  return task.page == 1 ? static_cast<int64_t>(task.slots[position])
                        : static_cast<int64_t>(task.slots[position / task.page]) * task.page + position % task.page;
}

static inline bool visible(const VerifyTask& task, int token, int64_t position) {
  if (position < task.prefix) return true;
  const int64_t node = position - task.prefix;
  if (task.tree_mask == nullptr) return node <= token;
  const uint32_t word = static_cast<uint32_t>(task.tree_mask[token * task.mask_stride + node / 32]);
  return (word >> (node % 32)) & 1u;
}

}  // namespace kdtree
