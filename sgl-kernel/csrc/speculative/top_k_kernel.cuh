// SPDX-License-Identifier: Apache-2.0
// The likeliest tokens of a row of logits, and the logarithm of the row's sum of exponentials, in one pass.
//
// A block goes through its row in tiles and lists what may be among the best. When the list is full it is sorted, cut
// to the best top_k, and the last of those bounds what is worth listing from then on: after the first tiles that is
// next to nothing, so the pass costs what reading the row does. A token's key is its logit in order-preserving bits
// with its complemented index below, so no two are equal and the result does not depend on the order of the threads.
#pragma once

#include "../attention/kdtree_mla/primitives.cuh"
#include "tree_params.h"

namespace kdtree {

constexpr int kTopKThreads = 512;
constexpr int kTopKItems = 16;  // of a thread, in a tile
constexpr int kListed = 2048;
constexpr float kLog2E = 1.4426950408889634f;

// Shared memory of a block.
struct TopKStorage {
  static constexpr int list = 0;
  static constexpr int maxima = list + kListed * 8;
  static constexpr int sums = maxima + kTopKThreads / 32 * 4;
  static constexpr int count = sums + kTopKThreads / 32 * 4;
  static constexpr int bytes = count + 16;
};

struct fp32 {};

KDTREE_DEVICE int64_t logit_bytes(fp32) { return 4; }
template <class T>
KDTREE_DEVICE int64_t logit_bytes(T) {
  return 2;
}

KDTREE_DEVICE float logit_at(fp32, const void* row, int64_t i) { return static_cast<const float*>(row)[i]; }
template <class T>
KDTREE_DEVICE float logit_at(T type, const void* row, int64_t i) {
  return unpack(type, static_cast<const uint16_t*>(row)[i]);
}

KDTREE_DEVICE uint64_t key_of(float logit, int32_t index) {
  const uint32_t bits = float_bits(logit + 0.0f);  // -0 and 0 are equal
  const uint32_t ordered = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  return uint64_t{ordered} << 32 | (0xffffffffu - static_cast<uint32_t>(index));
}

KDTREE_DEVICE float logit_of(uint64_t key) {
  const uint32_t ordered = static_cast<uint32_t>(key >> 32);
  return bits_float((ordered >> 31) != 0 ? ordered & 0x7fffffffu : ~ordered);
}

KDTREE_DEVICE int32_t index_of(uint64_t key) { return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(key)); }

// Sorts the first `count` keys of the list, largest first (a bitonic network). All threads of the block.
KDTREE_DEVICE void sort_list(uint64_t* list, int count) {
  int size = 2;
  while (size < count) size *= 2;
  for (int i = count + thread_index(); i < size; i += kTopKThreads) list[i] = 0;
  for (int run = 2; run <= size; run *= 2) {
    for (int stride = run / 2; stride > 0; stride /= 2) {
      barrier();
      for (int i = thread_index(); i < size / 2; i += kTopKThreads) {
        const int low = 2 * i - (i & (stride - 1)), high = low + stride;
        const bool descending = (low & run) == 0;
        const uint64_t a = list[low], b = list[high];
        if ((a < b) == descending) {
          list[low] = b;
          list[high] = a;
        }
      }
    }
  }
  barrier();
}

// Grid: a block a row.
template <class T>
KDTREE_KERNEL(kTopKThreads, 2)
top_k_kernel(const TopKParams p) {
  const int thread = thread_index(), lane = lane_index(), warp = warp_index();
  const int64_t row_index = block_index();
  const unsigned char* row = static_cast<const unsigned char*>(p.logits) + row_index * p.vocabulary * logit_bytes(T{});
  uint64_t* list = shared_pointer<uint64_t>(TopKStorage::list);
  int* count = shared_pointer<int>(TopKStorage::count);
  if (thread == 0) *count = 0;
  barrier();

  uint64_t bound = 0;  // what is not above it is not among the best
  float largest = -HUGE_VALF, sum = 0;
  constexpr int kTile = kTopKThreads * kTopKItems;
  for (int64_t first = 0; first < p.vocabulary; first += kTile) {
    float logits[kTopKItems];
    float top = largest;
    for (int i = 0; i < kTopKItems; ++i) {
      const int64_t at = first + i * kTopKThreads + thread;
      logits[i] = at < p.vocabulary ? logit_at(T{}, row, at) : -HUGE_VALF;
      if (!(logits[i] > -HUGE_VALF)) logits[i] = -HUGE_VALF;  // NaN
      top = fmaxf(top, logits[i]);
    }
    if (top > -HUGE_VALF) {
      sum *= exp2_fast((largest - top) * kLog2E);
      for (int i = 0; i < kTopKItems; ++i) sum += exp2_fast((logits[i] - top) * kLog2E);
      largest = top;
    }
    uint32_t wanted = 0;  // bit i: item i is to be listed
    for (int i = 0; i < kTopKItems; ++i) {
      const int64_t at = first + i * kTopKThreads + thread;
      if (at < p.vocabulary && key_of(logits[i], static_cast<int32_t>(at)) > bound) wanted |= 1u << i;
    }
    while (true) {
      for (int i = 0; i < kTopKItems; ++i) {
        const bool listing = (wanted >> i & 1) != 0;
        const uint32_t listers = ballot(listing);
        if (listers == 0) continue;
        int place = lane == 0 ? fetch_add(count, count_bits(listers)) : 0;
        place = shuffle(place, 0) + count_bits(listers & ((1u << lane) - 1));
        if (listing && place < kListed) {
          list[place] = key_of(logits[i], static_cast<int32_t>(first + i * kTopKThreads + thread));
          wanted &= ~(1u << i);
        }
      }
      if (!barrier_or(wanted != 0)) break;
      // The list is full. At most top_k of its keys are not below the bound that it gives.
      sort_list(list, kListed);
      bound = list[p.top_k - 1];
      if (thread == 0) *count = p.top_k;
      barrier();
      for (int i = 0; i < kTopKItems; ++i) {
        const int64_t at = first + i * kTopKThreads + thread;
        if (key_of(logits[i], static_cast<int32_t>(at)) <= bound) wanted &= ~(1u << i);
      }
    }
  }

  // The normaliser: lanes, then warps.
  for (int step = 16; step > 0; step /= 2) {
    const float other_largest = shuffle_xor(largest, step), other_sum = shuffle_xor(sum, step);
    const float top = fmaxf(largest, other_largest);
    if (top > -HUGE_VALF) {
      sum = sum * exp2_fast((largest - top) * kLog2E) + other_sum * exp2_fast((other_largest - top) * kLog2E);
      largest = top;
    }
  }
  float* maxima = shared_pointer<float>(TopKStorage::maxima);
  float* sums = shared_pointer<float>(TopKStorage::sums);
  if (lane == 0) {
    maxima[warp] = largest;
    sums[warp] = sum;
  }
  barrier();
  largest = -HUGE_VALF;
  sum = 0;
  for (int i = 0; i < kTopKThreads / 32; ++i) largest = fmaxf(largest, maxima[i]);
  for (int i = 0; i < kTopKThreads / 32; ++i) {
    if (maxima[i] > -HUGE_VALF) sum += sums[i] * exp2_fast((maxima[i] - largest) * kLog2E);
  }
  const float normaliser = largest > -HUGE_VALF ? largest + log2f(sum) / kLog2E : -HUGE_VALF;

  sort_list(list, *count);
  const int64_t out = row_index * p.top_k;
  for (int i = thread; i < p.top_k; i += kTopKThreads) {
    const float logit = logit_of(list[i]);
    p.log_probs[out + i] = logit > -HUGE_VALF ? logit - normaliser : -HUGE_VALF;
    p.token_ids[out + i] = p.first_id + index_of(list[i]);
  }
  if (thread == 0) p.normalisers[row_index] = normaliser;
}

}  // namespace kdtree
