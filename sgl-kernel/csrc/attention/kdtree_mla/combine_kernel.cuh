// SPDX-License-Identifier: Apache-2.0
// Merges the partial results of requests whose keys were attended by several groups of blocks, always in the groups'
// order, and fills the rows of absent requests. Requests that one group attended whole are written already.
#pragma once

#include "params.h"
#include "primitives.cuh"
#include "schedule.cuh"
#include "verify_kernel.cuh"

namespace kdtree {

constexpr int kCombineThreads = 256;
constexpr int kLaneColumns = kLatent / 32;  // of a row: 4 times 4, 128 columns apart

template <class T>
KDTREE_DEVICE void write_row(void* out, int64_t row, int lane, const float (&v)[kLaneColumns], float norm) {
#pragma unroll
  for (int i = 0; i < kLaneColumns / 4; ++i) {
    uint2* to = reinterpret_cast<uint2*>(static_cast<char*>(out) + (row * kLatent + i * 128 + lane * 4) * 2);
    *to = make_uint2(pack(T{}, v[i * 4] * norm, v[i * 4 + 1] * norm),
                     pack(T{}, v[i * 4 + 2] * norm, v[i * 4 + 3] * norm));
  }
}

// A block has 8 / kRowWarps rows; the kRowWarps warps of a row share its splits: warp w takes every kRowWarps-th.
template <class T, int kRowWarps>
KDTREE_KERNEL(kCombineThreads, 1)
combine_kernel(const VerifyParams p, int rows_a_block) {
  const int lane = lane_index();
  const int warp = warp_index();
  const int part = warp % kRowWarps;
  const int64_t out_row = int64_t{block_index()} * (kWarps / kRowWarps) + warp / kRowWarps;
  const bool exists = out_row < int64_t{p.batch} * p.rows;
  const int request = exists ? static_cast<int>(out_row / p.rows) : 0;
  const int row = static_cast<int>(out_row - int64_t{request} * p.rows);
  const Place place = place_of(p, request);
  const int share = share_of(p, all_tiles(p));
  const int first = place.first / share;
  const int last = place.tiles == 0 ? first : (place.first + place.tiles - 1) / share;
  const bool merges = exists && first != last;

  float peak = -kInfinity, sum = 0.f;
  float merged[kLaneColumns] = {};
  if (merges) {
    const int row_block = row / rows_a_block;
    const int block_row = row - row_block * rows_a_block;
    // The peak over all splits first, so that the loads of the second loop depend on nothing.
    for (int split = first + lane; split <= last; split += 32) {
      const int64_t partial = partial_row(p, rows_a_block, split, split == first, row_block) + block_row;
      peak = fmaxf(peak, p.partial_peak[partial]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) peak = fmaxf(peak, shuffle_xor(peak, step));
    if (peak > -kInfinity) {
#pragma unroll 4
      for (int split = first + part; split <= last; split += kRowWarps) {
        const int64_t partial = partial_row(p, rows_a_block, split, split == first, row_block) + block_row;
        const float weight = exp2_fast(p.partial_peak[partial] - peak);
        sum += weight * p.partial_sum[partial];
        const float4* from = reinterpret_cast<const float4*>(p.partial_out + partial * kLatent) + lane;
#pragma unroll
        for (int i = 0; i < kLaneColumns / 4; ++i) {
          const float4 v = from[i * 32];
          merged[i * 4] += weight * v.x;
          merged[i * 4 + 1] += weight * v.y;
          merged[i * 4 + 2] += weight * v.z;
          merged[i * 4 + 3] += weight * v.w;
        }
      }
    }
  }
  if (kRowWarps > 1) {
    // Every warp but the row's first leaves its part in shared memory.
    const uint32_t place_of_part = shared_memory() + warp * (kLatent + 4) * 4;
    if (part != 0) {
#pragma unroll
      for (int i = 0; i < kLaneColumns / 4; ++i) {
        const float v[4] = {merged[i * 4], merged[i * 4 + 1], merged[i * 4 + 2], merged[i * 4 + 3]};
        store_shared(place_of_part + (i * 32 + lane) * 16, v);
      }
      if (lane == 0) store_shared(place_of_part + kLatent * 4, sum);
    }
    barrier();
    if (part != 0) return;
    for (int other = 1; other < kRowWarps; ++other) {
      const uint32_t from = place_of_part + other * (kLatent + 4) * 4;
      sum += load_shared(from + kLatent * 4);
#pragma unroll
      for (int i = 0; i < kLaneColumns / 4; ++i) {
        float v[4];
        load_shared(from + (i * 32 + lane) * 16, v);
#pragma unroll
        for (int j = 0; j < 4; ++j) merged[i * 4 + j] += v[j];
      }
    }
  }
  if (!merges && !(exists && place.tiles == 0)) return;
  write_row<T>(p.out, out_row, lane, merged, sum > 0.f ? p.k_scale / sum : 0.f);
  if (lane == 0 && p.lse != nullptr) p.lse[out_row] = natural_lse(sum, peak);
}

constexpr int combine_shared_bytes(int row_warps) { return row_warps > 1 ? kWarps * (kLatent + 4) * 4 : 0; }

}  // namespace kdtree
