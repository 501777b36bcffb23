// SPDX-License-Identifier: Apache-2.0
// The CPU verify-attention kernel, one template for all instruction sets.
//
// Each file that includes this is compiled for one instruction set (see CMakeLists.txt), passes an `Isa` and
// exports one VerifyKernel. Everything here is in an unnamed namespace, so that no function compiled for
// AVX-512 can be picked by the linker for a caller that runs without it.
//
// Contraction works in 32-bit units: one fp32 value, or a pair of bf16 values where the CPU has bf16 dot products.
// With that, Q.K^T and P.V are the same matrix product (`product`), on tiles packed unit by unit:
//
//   keys    [kHeadUnits][kTileKeys]   K transposed: unit u of key n at [u][n]
//   values  [kKeyUnits][kLatent]      V: unit u (one key, or two adjacent keys) of column c at [u][c]
//
// V is the first 512 columns of K, so one gather of a key's row serves both.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "mla_verify.h"

namespace {

using kdtree::kHead;
using kdtree::kKeyGroup;
using kdtree::kLatent;
using kdtree::kMaxBlockRows;
using kdtree::kTileKeys;
using kdtree::Partial;
using kdtree::Storage;
using kdtree::VerifyTask;

constexpr float kMinusInf = -__builtin_inff();

// C[rows, columns] = (alpha ? alpha[row] * C : 0) + A[rows, units] . B[units, columns].
struct Product {
  int rows, columns, units;
  const float* a;
  int lda;
  const float* b;
  int ldb;
  float* c;
  int ldc;
  const float* alpha;
};

// MR rows from `row` on times NV vectors of columns from `column` on, in registers.
template <class Isa, int MR, int NV>
inline void product_block(const Product& p, int row, int column) {
  using V = typename Isa::Vector;
  const float* a = p.a + row * p.lda;
  const float* b = p.b + column;
  float* c = p.c + row * p.ldc + column;
  V acc[MR][NV];
  for (int m = 0; m < MR; ++m) {
    for (int v = 0; v < NV; ++v) {
      acc[m][v] = p.alpha == nullptr
                      ? Isa::zero()
                      : Isa::mul(Isa::broadcast(p.alpha + row + m), Isa::load(c + m * p.ldc + v * Isa::kLanes));
    }
  }
  for (int u = 0; u < p.units; ++u) {
    V bv[NV];
    for (int v = 0; v < NV; ++v) bv[v] = Isa::load(b + u * p.ldb + v * Isa::kLanes);
    for (int m = 0; m < MR; ++m) {
      const V am = Isa::broadcast(a + m * p.lda + u);
      for (int v = 0; v < NV; ++v) acc[m][v] = Isa::multiply_add(am, bv[v], acc[m][v]);
    }
  }
  for (int m = 0; m < MR; ++m) {
    for (int v = 0; v < NV; ++v) Isa::store(c + m * p.ldc + v * Isa::kLanes, acc[m][v]);
  }
}

template <class Isa, int MR>
inline void product_rows(const Product& p, int row) {
  constexpr int kWide = Isa::kColumnVectors * Isa::kLanes;
  int column = 0;
  for (; column + kWide <= p.columns; column += kWide) product_block<Isa, MR, Isa::kColumnVectors>(p, row, column);
  for (; column < p.columns; column += Isa::kLanes) product_block<Isa, MR, 1>(p, row, column);
}

// Columns must be a multiple of Isa::kLanes. Rows go in groups as even as possible: a last group of one or two would
// wait for the loads of B.
template <class Isa>
void product(const Product& p) {
  static_assert(Isa::kRows == 6);
  const int groups = (p.rows + Isa::kRows - 1) / Isa::kRows;
  for (int group = 0; group < groups; ++group) {
    const int row = p.rows * group / groups;
    switch (p.rows * (group + 1) / groups - row) {
      case 1: product_rows<Isa, 1>(p, row); break;
      case 2: product_rows<Isa, 2>(p, row); break;
      case 3: product_rows<Isa, 3>(p, row); break;
      case 4: product_rows<Isa, 4>(p, row); break;
      case 5: product_rows<Isa, 5>(p, row); break;
      default: product_rows<Isa, 6>(p, row); break;
    }
  }
}

// What one thread works in; the caller owns it.
template <class Isa>
struct Scratch {
  static constexpr int kHeadUnits = kHead / Isa::kUnit;
  static constexpr int kKeyUnits = kTileKeys / Isa::kUnit;
  alignas(64) float query[kMaxBlockRows * kHeadUnits];
  alignas(64) float keys[kHeadUnits * kTileKeys];
  alignas(64) float values[kKeyUnits * kLatent];
  alignas(64) float scores[kMaxBlockRows * kTileKeys];
  alignas(64) float weights[kMaxBlockRows * kKeyUnits];
  alignas(64) float alpha[kMaxBlockRows];
};

// Keys of the tile that starts at `first`. (Not std::min, here and below: the linker could give its instantiation to a
// file compiled for another instruction set.)
inline int tile_count(int64_t first, int64_t end) {
  return static_cast<int>(end - first < kTileKeys ? end - first : kTileKeys);
}

// The slots of one tile as row pointers; a key past the end reads zeros (its weight is zero, so it must be finite).
inline void gather_rows(const VerifyTask& task, int64_t first, int count, int padded, const char** rows) {
  alignas(64) static const char zeros[kHead * 4] = {};
  for (int n = 0; n < padded; ++n) {
    rows[n] = n < count ? task.kv + kdtree::slot_of(task, first + n) * task.kv_stride : zeros;
  }
}

inline void prefetch_rows(const VerifyTask& task, int64_t first, int64_t end, int row_bytes) {
  const int count = tile_count(first, end);
  for (int n = 0; n < count; ++n) {
    const char* row = task.kv + kdtree::slot_of(task, first + n) * task.kv_stride;
    for (int byte = 0; byte < row_bytes; byte += 64) _mm_prefetch(row + byte, _MM_HINT_T1);
  }
}

// One tile's online-softmax step (Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1), base 2: scores become
// weights, the running maximum and sum move on, and alpha is what the accumulated output must be scaled by.
template <class Isa>
void softmax_step(const VerifyTask& task, int64_t first, int count, int padded, Scratch<Isa>& s, Partial& partial) {
  using V = typename Isa::Vector;
  const bool all_visible = count == padded && first + count <= task.prefix;
  for (int r = 0; r < task.rows; ++r) {
    float* score = s.scores + r * kTileKeys;
    if (!all_visible) {
      const int token = (task.first_row + r) / task.heads;
      for (int n = 0; n < padded; ++n) {
        if (n >= count || !kdtree::visible(task, token, first + n)) score[n] = kMinusInf;
      }
    }
    V peak = Isa::load(score);
    for (int n = Isa::kLanes; n < padded; n += Isa::kLanes) peak = Isa::max(peak, Isa::load(score + n));
    // A row that has seen nothing yet keeps -inf as its maximum, and 0 as the base, so that no -inf - -inf arises.
    const float tile_peak = Isa::reduce_max(peak) * task.scale;
    const float top = tile_peak > partial.peak[r] ? tile_peak : partial.peak[r];
    const float base = top == kMinusInf ? 0.f : top;
    s.alpha[r] = ::exp2f(partial.peak[r] - base);
    V sum = Isa::zero();
    const V shift = Isa::set1(-base);
    const V factor = Isa::set1(task.scale);
    for (int n = 0; n < padded; n += Isa::kLanes) {
      const V weight = Isa::exp2(Isa::fma(Isa::load(score + n), factor, shift));
      sum = Isa::add(sum, weight);
      Isa::store_weights(s.weights + r * Scratch<Isa>::kKeyUnits, n, weight);
    }
    partial.sum[r] = partial.sum[r] * s.alpha[r] + Isa::reduce_add(sum);
    partial.peak[r] = top;
  }
}

// Attention of one block of rows over keys [task.begin, task.end), unnormalised, into `partial`.
template <class Isa, Storage kStorage>
void attend(const VerifyTask& task, void* scratch, Partial& partial) {
  static_assert(sizeof(Scratch<Isa>) <= kdtree::kScratchBytes);
  Scratch<Isa>& s = *static_cast<Scratch<Isa>*>(scratch);
  constexpr int kHeadUnits = Scratch<Isa>::kHeadUnits;
  constexpr int kKeyUnits = Scratch<Isa>::kKeyUnits;
  constexpr int kRowBytes = kHead * (kStorage == Storage::fp32 ? 4 : 2);
  for (int r = 0; r < task.rows; ++r) {
    Isa::template pack_query<kStorage>(kdtree::query_row(task, r), s.query + r * kHeadUnits);
    partial.peak[r] = kMinusInf;
    partial.sum[r] = 0.f;
  }
  std::memset(partial.out, 0, sizeof(float) * task.rows * kLatent);
  const char* rows[kTileKeys];
  for (int64_t first = task.begin; first < task.end; first += kTileKeys) {
    const int count = tile_count(first, task.end);
    const int padded = (count + kKeyGroup - 1) / kKeyGroup * kKeyGroup;
    gather_rows(task, first, count, padded, rows);
    if (first + kTileKeys < task.end) prefetch_rows(task, first + kTileKeys, task.end, kRowBytes);
    Isa::template pack_keys<kStorage>(rows, padded, s.keys);
    product<Isa>({task.rows, padded, kHeadUnits, s.query, kHeadUnits, s.keys, kTileKeys, s.scores, kTileKeys, nullptr});
    softmax_step<Isa>(task, first, count, padded, s, partial);
    Isa::template pack_values<kStorage>(rows, padded, s.values);
    product<Isa>({task.rows, kLatent, padded / Isa::kUnit, s.weights, kKeyUnits, s.values, kLatent, partial.out,
                  kLatent, s.alpha});
  }
}

}  // namespace
