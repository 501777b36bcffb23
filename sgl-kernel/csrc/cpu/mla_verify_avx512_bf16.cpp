// SPDX-License-Identifier: Apache-2.0
// The verify kernel for CPUs with AVX-512 and its bf16 dot products (Intel from Cooper Lake on, AMD from Zen 4 on).
#include "mla_verify_kernel.h"

namespace {

// 16x16 transpose of 32-bit units: rows[i] holds units of key i; on return rows[u] holds unit u of the 16 keys.
inline void transpose(__m512i (&rows)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // Now each 128-bit lane q of rows[4g + j] holds unit 4q + j of keys 4g .. 4g + 3: transpose the lanes.
  for (int j = 0; j < 4; ++j) {
    const __m512i low = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0x88);
    const __m512i odd = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0xdd);
    const __m512i low2 = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0x88);
    const __m512i odd2 = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0xdd);
    t[j] = _mm512_shuffle_i32x4(low, low2, 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(odd, odd2, 0x88);
    t[8 + j] = _mm512_shuffle_i32x4(low, low2, 0xdd);
    t[12 + j] = _mm512_shuffle_i32x4(odd, odd2, 0xdd);
  }
  for (int i = 0; i < 16; ++i) rows[i] = t[i];
}

struct Avx512 {
  using Vector = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kRows = 6;
  static constexpr int kColumnVectors = 4;

  static Vector zero() { return _mm512_setzero_ps(); }
  static Vector set1(float x) { return _mm512_set1_ps(x); }
  static Vector broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static Vector load(const float* p) { return _mm512_load_ps(p); }
  static void store(float* p, Vector v) { _mm512_store_ps(p, v); }
  static Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
  static Vector mul(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
  static Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  static float reduce_max(Vector v) { return _mm512_reduce_max_ps(v); }
  static float reduce_add(Vector v) { return _mm512_reduce_add_ps(v); }

  // 2^x for x <= 0: Taylor polynomial of 2^f on [-1/2, 1/2], error below 2 ulp; -inf gives 0.
  static Vector exp2(Vector x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-200.f));
    const Vector whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vector f = _mm512_sub_ps(x, whole);
    Vector p = _mm512_set1_ps(1.5403530393e-4f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.3333558146e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6181291076e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504108665e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022650696e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718056e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.f));
    return _mm512_scalef_ps(p, whole);
  }

  template <Storage kStorage>
  static Vector load_values(const char* row, int column) {
    if constexpr (kStorage == Storage::fp32) {
      return _mm512_loadu_ps(reinterpret_cast<const float*>(row) + column);
    } else {
      const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + column * 2));
      if constexpr (kStorage == Storage::fp16) return _mm512_cvtph_ps(half);
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
  }
};

// A unit is one fp32 value: fp32 and fp16 tensors.
struct Fp32Units : Avx512 {
  static constexpr int kUnit = 1;

  static Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  static void store_weights(float* row, int key, Vector weight) { _mm512_store_ps(row + key, weight); }

  template <Storage kStorage>
  static void pack_query(const char* row, float* to) {
    for (int c = 0; c < kHead; c += kLanes) _mm512_store_ps(to + c, load_values<kStorage>(row, c));
  }

  template <Storage kStorage>
  static void pack_keys(const char* const* rows, int count, float* to) {
    for (int n = 0; n < count; n += 16) {
      for (int c = 0; c < kHead; c += 16) {
        __m512i t[16];
        for (int i = 0; i < 16; ++i) t[i] = _mm512_castps_si512(load_values<kStorage>(rows[n + i], c));
        transpose(t);
        for (int i = 0; i < 16; ++i) _mm512_store_si512(to + (c + i) * kTileKeys + n, t[i]);
      }
    }
  }

  template <Storage kStorage>
  static void pack_values(const char* const* rows, int count, float* to) {
    for (int n = 0; n < count; ++n) {
      for (int c = 0; c < kLatent; c += kLanes) {
        _mm512_store_ps(to + n * kLatent + c, load_values<kStorage>(rows[n], c));
      }
    }
  }
};

// A unit is a pair of bf16 values: bf16 tensors.
struct Bf16Units : Avx512 {
  static constexpr int kUnit = 2;

  static Vector multiply_add(Vector a, Vector b, Vector c) {
    return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  static void store_weights(float* row, int key, Vector weight) {
    const __m256bh half = _mm512_cvtneps_pbh(weight);
    _mm256_store_si256(reinterpret_cast<__m256i*>(row + key / 2), reinterpret_cast<const __m256i&>(half));
  }

  template <Storage>
  static void pack_query(const char* row, float* to) {
    std::memcpy(to, row, kHead * 2);
  }

  template <Storage>
  static void pack_keys(const char* const* rows, int count, float* to) {
    for (int n = 0; n < count; n += 16) {
      for (int u = 0; u < kHead / 2; u += 16) {
        __m512i t[16];
        for (int i = 0; i < 16; ++i) t[i] = _mm512_loadu_si512(rows[n + i] + u * 4);
        transpose(t);
        for (int i = 0; i < 16; ++i) _mm512_store_si512(to + (u + i) * kTileKeys + n, t[i]);
      }
    }
  }

  template <Storage>
  static void pack_values(const char* const* rows, int count, float* to) {
    alignas(64) int16_t order[2][32];  // picks the 16-bit values of two rows alternately: columns 0-15, then 16-31
    for (int i = 0; i < 32; ++i) {
      order[0][i] = static_cast<int16_t>(i / 2 + (i % 2) * 32);
      order[1][i] = static_cast<int16_t>(order[0][i] + 16);
    }
    const __m512i low = _mm512_load_si512(order[0]);
    const __m512i high = _mm512_load_si512(order[1]);
    for (int u = 0; u < count / 2; ++u) {
      for (int c = 0; c < kLatent; c += 32) {
        const __m512i even = _mm512_loadu_si512(rows[2 * u] + c * 2);
        const __m512i odd = _mm512_loadu_si512(rows[2 * u + 1] + c * 2);
        _mm512_store_si512(to + u * kLatent + c, _mm512_permutex2var_epi16(even, low, odd));
        _mm512_store_si512(to + u * kLatent + c + 16, _mm512_permutex2var_epi16(even, high, odd));
      }
    }
  }
};

}  // namespace

void kdtree::verify_avx512_bf16(Storage storage, const VerifyTask& task, void* scratch, Partial& partial) {
  switch (storage) {
    case Storage::fp32: return attend<Fp32Units, Storage::fp32>(task, scratch, partial);
    case Storage::fp16: return attend<Fp32Units, Storage::fp16>(task, scratch, partial);
    case Storage::bf16: return attend<Bf16Units, Storage::bf16>(task, scratch, partial);
  }
}
