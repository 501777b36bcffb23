// SPDX-License-Identifier: Apache-2.0
// The verify kernel for CPUs with AVX2, FMA and F16C: everything is computed in fp32.
#include "mla_verify_kernel.h"

namespace {

struct Avx2 {
  using Vector = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kRows = 6;
  static constexpr int kColumnVectors = 2;
  static constexpr int kUnit = 1;

  static Vector zero() { return _mm256_setzero_ps(); }
  static Vector set1(float x) { return _mm256_set1_ps(x); }
  static Vector broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  static Vector load(const float* p) { return _mm256_load_ps(p); }
  static void store(float* p, Vector v) { _mm256_store_ps(p, v); }
  static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static Vector mul(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
  static Vector max(Vector a, Vector b) { return _mm256_max_ps(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
  static Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }

  static float reduce_max(Vector v) {
    alignas(32) float x[kLanes];
    _mm256_store_ps(x, v);
    float top = x[0];
    for (int i = 1; i < kLanes; ++i) top = x[i] > top ? x[i] : top;
    return top;
  }
  static float reduce_add(Vector v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
  }

  // 2^x for x <= 0: Taylor polynomial of 2^f on [-1/2, 1/2], error below 2 ulp; below 2^-126 the result is 0.
  static Vector exp2(Vector x) {
    const Vector seen = _mm256_cmp_ps(x, _mm256_set1_ps(-126.f), _CMP_GE_OQ);
    x = _mm256_max_ps(x, _mm256_set1_ps(-126.f));
    const Vector whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vector f = _mm256_sub_ps(x, whole);
    Vector p = _mm256_set1_ps(1.5403530393e-4f);
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.3333558146e-3f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(9.6181291076e-3f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(5.5504108665e-2f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(2.4022650696e-1f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(6.9314718056e-1f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.f));
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
    return _mm256_and_ps(seen, _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent)));
  }

  template <Storage kStorage>
  static Vector load_values(const char* row, int column) {
    if constexpr (kStorage == Storage::fp32) {
      return _mm256_loadu_ps(reinterpret_cast<const float*>(row) + column);
    } else {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + column * 2));
      if constexpr (kStorage == Storage::fp16) return _mm256_cvtph_ps(half);
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
  }

  static void store_weights(float* row, int key, Vector weight) { _mm256_store_ps(row + key, weight); }

  template <Storage kStorage>
  static void pack_query(const char* row, float* to) {
    for (int c = 0; c < kHead; c += kLanes) _mm256_store_ps(to + c, load_values<kStorage>(row, c));
  }

  template <Storage kStorage>
  static void pack_keys(const char* const* rows, int count, float* to) {
    for (int n = 0; n < count; n += 8) {
      for (int c = 0; c < kHead; c += 8) {
        Vector t[8], u[8];
        for (int i = 0; i < 8; ++i) t[i] = load_values<kStorage>(rows[n + i], c);
        for (int i = 0; i < 8; i += 2) {
          u[i] = _mm256_unpacklo_ps(t[i], t[i + 1]);
          u[i + 1] = _mm256_unpackhi_ps(t[i], t[i + 1]);
        }
        for (int i = 0; i < 8; i += 4) {
          t[i] = _mm256_shuffle_ps(u[i], u[i + 2], 0x44);
          t[i + 1] = _mm256_shuffle_ps(u[i], u[i + 2], 0xee);
          t[i + 2] = _mm256_shuffle_ps(u[i + 1], u[i + 3], 0x44);
          t[i + 3] = _mm256_shuffle_ps(u[i + 1], u[i + 3], 0xee);
        }
        for (int i = 0; i < 4; ++i) {
          _mm256_store_ps(to + (c + i) * kTileKeys + n, _mm256_permute2f128_ps(t[i], t[4 + i], 0x20));
          _mm256_store_ps(to + (c + 4 + i) * kTileKeys + n, _mm256_permute2f128_ps(t[i], t[4 + i], 0x31));
        }
      }
    }
  }

  template <Storage kStorage>
  static void pack_values(const char* const* rows, int count, float* to) {
    for (int n = 0; n < count; ++n) {
      for (int c = 0; c < kLatent; c += kLanes) {
        _mm256_store_ps(to + n * kLatent + c, load_values<kStorage>(rows[n], c));
      }
    }
  }
};

}  // namespace

void kdtree::verify_avx2(Storage storage, const VerifyTask& task, void* scratch, Partial& partial) {
  switch (storage) {
    case Storage::fp32: return attend<Avx2, Storage::fp32>(task, scratch, partial);
    case Storage::fp16: return attend<Avx2, Storage::fp16>(task, scratch, partial);
    case Storage::bf16: return attend<Avx2, Storage::bf16>(task, scratch, partial);
  }
}
