// Sixteen floats at a time with AVX-512; see simd_portable.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace pagetrie {
namespace {

constexpr int kBlockRows = 12;  // with one register of columns

struct V16 {
  __m512 v;
};

inline V16 load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline V16 load(const uint16_t* halves) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)))};
}
inline void store(float* to, V16 x) { _mm512_storeu_ps(to, x.v); }
inline void store(uint16_t* halves, V16 x) {
  // Of two operands with a NaN these give the second, so NaN stays.
  const __m512 v = _mm512_max_ps(_mm512_set1_ps(-65504.0f), _mm512_min_ps(_mm512_set1_ps(65504.0f), x.v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(halves), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
inline V16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline V16 zero() { return {_mm512_setzero_ps()}; }
inline V16 add(V16 x, V16 y) { return {_mm512_add_ps(x.v, y.v)}; }
inline V16 sub(V16 x, V16 y) { return {_mm512_sub_ps(x.v, y.v)}; }
inline V16 mul(V16 x, V16 y) { return {_mm512_mul_ps(x.v, y.v)}; }
inline V16 fma(V16 x, V16 y, V16 z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
inline V16 at_least(V16 low, V16 x) { return {_mm512_max_ps(low.v, x.v)}; }

inline V16 scale_exponent(V16 x, V16 t) {
  const __m512i shift = _mm512_slli_epi32(_mm512_castps_si512(t.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x.v), shift))};
}

inline bool any_greater(V16 x, V16 y) { return _mm512_cmp_ps_mask(x.v, y.v, _CMP_GT_OQ) != 0; }

inline V16 select_range(int low, int high, V16 x, V16 y) {
  const __m512i i = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 in = _mm512_cmpge_epi32_mask(i, _mm512_set1_epi32(low)) &
                       _mm512_cmple_epi32_mask(i, _mm512_set1_epi32(high));
  return {_mm512_mask_blend_ps(in, y.v, x.v)};
}

inline float max_lane(V16 x) { return _mm512_reduce_max_ps(x.v); }

inline float sum_lanes(V16 x) {
  const __m256 s = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  __m128 v = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  v = _mm_add_ps(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
}

inline V16 mul_complex(V16 x, V16 y) {
  const __m512 swapped = _mm512_permute_ps(x.v, 0xb1);
  return {_mm512_fmaddsub_ps(x.v, _mm512_moveldup_ps(y.v), _mm512_mul_ps(swapped, _mm512_movehdup_ps(y.v)))};
}

inline void prefetch(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0); }

}  // namespace
}  // namespace pagetrie
