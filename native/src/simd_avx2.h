// Sixteen floats at a time with AVX2, FMA and F16C; see simd_portable.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace pagetrie {
namespace {

constexpr int kBlockRows = 6;  // with two registers of columns: 12 of the 16 hold sums

struct V16 {
  __m256 a, b;
};

inline V16 load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline V16 load(const uint16_t* halves) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + 8)))};
}
inline void store(float* to, V16 x) {
  _mm256_storeu_ps(to, x.a);
  _mm256_storeu_ps(to + 8, x.b);
}
inline V16 broadcast(float x) {
  const __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
inline V16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V16 add(V16 x, V16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline V16 sub(V16 x, V16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline V16 mul(V16 x, V16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline V16 fma(V16 x, V16 y, V16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline V16 at_least(V16 low, V16 x) { return {_mm256_max_ps(low.a, x.a), _mm256_max_ps(low.b, x.b)}; }

inline void store(uint16_t* halves, V16 x) {
  const __m256 high = _mm256_set1_ps(65504.0f), low = _mm256_set1_ps(-65504.0f);
  // Of two operands with a NaN these give the second, so NaN stays.
  const __m256 a = _mm256_max_ps(low, _mm256_min_ps(high, x.a)), b = _mm256_max_ps(low, _mm256_min_ps(high, x.b));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(halves), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(halves + 8), _mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT));
}

inline __m256 scale_exponent8(__m256 x, __m256 t) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}
inline V16 scale_exponent(V16 x, V16 t) { return {scale_exponent8(x.a, t.a), scale_exponent8(x.b, t.b)}; }

inline bool any_greater(V16 x, V16 y) {
  const __m256 a = _mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), b = _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ);
  return _mm256_movemask_ps(_mm256_or_ps(a, b)) != 0;
}

inline V16 select_range(int low, int high, V16 x, V16 y) {
  const __m256i l = _mm256_set1_epi32(low - 1), h = _mm256_set1_epi32(high + 1);
  const __m256i i = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), j = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
  const __m256i in_a = _mm256_and_si256(_mm256_cmpgt_epi32(i, l), _mm256_cmpgt_epi32(h, i));
  const __m256i in_b = _mm256_and_si256(_mm256_cmpgt_epi32(j, l), _mm256_cmpgt_epi32(h, j));
  return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(in_a)), _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(in_b))};
}

inline float max_lane(V16 x) {
  const __m256 m = _mm256_max_ps(x.a, x.b);
  __m128 v = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
  v = _mm_max_ps(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)));
}

inline float sum_lanes(V16 x) {
  const __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 v = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  v = _mm_add_ps(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
}

inline __m256 mul_complex8(__m256 x, __m256 y) {
  const __m256 swapped = _mm256_permute_ps(x, 0xb1);
  return _mm256_fmaddsub_ps(x, _mm256_moveldup_ps(y), _mm256_mul_ps(swapped, _mm256_movehdup_ps(y)));
}
inline V16 mul_complex(V16 x, V16 y) { return {mul_complex8(x.a, y.a), mul_complex8(x.b, y.b)}; }

inline void prefetch(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0); }

}  // namespace
}  // namespace pagetrie
