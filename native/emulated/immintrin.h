// The AVX-512 intrinsics that the kernels use, done with AVX2, FMA and F16C, so that machines without AVX-512 can test
// the kernels for it. A build with PAGETRIE_EMULATE_AVX512 finds this before the compiler's header. The names are
// declared in the kernels' own namespace, where they hide the compiler's. Each gives bit for bit what Intel's manual
// says of the instruction; check.cpp tests them against definitions of one lane. (Which NaN comes of arithmetic on
// several is left open, as compilers leave it.)
#pragma once

#include_next <immintrin.h>

#include <cstdint>
#include <cstring>

#ifndef __AVX512F__
#define __AVX512F__ 1  // what simd_int.h chooses by
#endif

// Where optimisation is off, the compiler's are macros.
#undef _mm512_cmp_ps_mask
#undef _mm512_cmpge_epi32_mask
#undef _mm512_cmple_epi32_mask
#undef _mm512_cvtps_ph
#undef _mm512_extractf32x8_ps
#undef _mm512_permute_ps
#undef _mm512_slli_epi32
#undef _mm512_srli_epi16

namespace pagetrie {
namespace {

struct __m512 {
  __m256 a, b;  // lanes 0 to 7, 8 to 15
};

struct __m512i {
  __m256i a, b;
};

inline __m512 _mm512_setzero_ps() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline __m512 _mm512_set1_ps(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline __m512i _mm512_setzero_si512() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline __m512i _mm512_set1_epi8(char x) { return {_mm256_set1_epi8(x), _mm256_set1_epi8(x)}; }
inline __m512i _mm512_set1_epi32(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline __m512i _mm512_setr_epi32(int x0, int x1, int x2, int x3, int x4, int x5, int x6, int x7, int x8, int x9,
                                 int x10, int x11, int x12, int x13, int x14, int x15) {
  return {_mm256_setr_epi32(x0, x1, x2, x3, x4, x5, x6, x7), _mm256_setr_epi32(x8, x9, x10, x11, x12, x13, x14, x15)};
}

inline __m512 _mm512_loadu_ps(const void* from) {
  const float* at = static_cast<const float*>(from);
  return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)};
}
inline void _mm512_storeu_ps(void* to, __m512 x) {
  float* at = static_cast<float*>(to);
  _mm256_storeu_ps(at, x.a);
  _mm256_storeu_ps(at + 8, x.b);
}
inline __m512i _mm512_loadu_si512(const void* from) {
  const __m256i* at = static_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}

inline __m512 _mm512_castsi512_ps(__m512i x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline __m512i _mm512_castps_si512(__m512 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline __m256 _mm512_castps512_ps256(__m512 x) { return x.a; }
inline __m256 _mm512_extractf32x8_ps(__m512 x, int half) { return half ? x.b : x.a; }

inline __m512 _mm512_add_ps(__m512 x, __m512 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline __m512 _mm512_sub_ps(__m512 x, __m512 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline __m512 _mm512_mul_ps(__m512 x, __m512 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline __m512 _mm512_div_ps(__m512 x, __m512 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline __m512 _mm512_max_ps(__m512 x, __m512 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline __m512 _mm512_min_ps(__m512 x, __m512 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline __m512 _mm512_fmadd_ps(__m512 x, __m512 y, __m512 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline __m512 _mm512_fmaddsub_ps(__m512 x, __m512 y, __m512 z) {
  return {_mm256_fmaddsub_ps(x.a, y.a, z.a), _mm256_fmaddsub_ps(x.b, y.b, z.b)};
}
inline __m512 _mm512_movehdup_ps(__m512 x) { return {_mm256_movehdup_ps(x.a), _mm256_movehdup_ps(x.b)}; }
inline __m512 _mm512_moveldup_ps(__m512 x) { return {_mm256_moveldup_ps(x.a), _mm256_moveldup_ps(x.b)}; }
inline __m512 _mm512_permute_ps(__m512 x, int order) {
  const __m256i from = _mm256_setr_epi32(order, order >> 2, order >> 4, order >> 6, order, order >> 2, order >> 4,
                                         order >> 6);  // of each, the low two bits count
  return {_mm256_permutevar_ps(x.a, from), _mm256_permutevar_ps(x.b, from)};
}

inline __m512i _mm512_and_si512(__m512i x, __m512i y) {
  return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)};
}
inline __m512i _mm512_xor_si512(__m512i x, __m512i y) {
  return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)};
}
inline __m512i _mm512_add_epi32(__m512i x, __m512i y) {
  return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
inline __m512i _mm512_max_epi32(__m512i x, __m512i y) {
  return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)};
}
inline __m512i _mm512_slli_epi32(__m512i x, unsigned bits) {
  return {_mm256_slli_epi32(x.a, static_cast<int>(bits)), _mm256_slli_epi32(x.b, static_cast<int>(bits))};
}
inline __m512i _mm512_srli_epi16(__m512i x, unsigned bits) {
  return {_mm256_srli_epi16(x.a, static_cast<int>(bits)), _mm256_srli_epi16(x.b, static_cast<int>(bits))};
}

inline __m512 _mm512_cvtepi32_ps(__m512i x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline __m512i _mm512_cvtps_epi32(__m512 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline __m512 _mm512_cvtph_ps(__m256i x) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
template <int rounding>
inline __m256i halves_of(__m512 x) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm256_cvtps_ph(x.a, rounding)),
                                 _mm256_cvtps_ph(x.b, rounding), 1);
}
#define _mm512_cvtps_ph(x, rounding) halves_of<rounding>(x)

// The low byte of each, as it is.
inline __m128i _mm512_cvtepi32_epi8(__m512i x) {
  alignas(32) int32_t lanes[16];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), x.a);
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes + 8), x.b);
  alignas(16) uint8_t bytes[16];
  for (int i = 0; i < 16; i++) bytes[i] = static_cast<uint8_t>(lanes[i]);
  return _mm_load_si128(reinterpret_cast<const __m128i*>(bytes));
}

// To each sum the four products of an unsigned byte of x and a signed one of y, without saturation.
inline __m256i dot_bytes(__m256i sum, __m256i x, __m256i y) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(x, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(y, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(x, 8), _mm256_srai_epi16(y, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
inline __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i x, __m512i y) {
  return {dot_bytes(sum.a, x.a, y.a), dot_bytes(sum.b, x.b, y.b)};
}

// A mask holds lane i in bit i.
inline unsigned bits_of(__m256 low, __m256 high) {
  return static_cast<unsigned>(_mm256_movemask_ps(low)) | static_cast<unsigned>(_mm256_movemask_ps(high)) << 8;
}
inline __mmask16 greater(__m512i x, __m512i y) {
  return static_cast<__mmask16>(bits_of(_mm256_castsi256_ps(_mm256_cmpgt_epi32(x.a, y.a)),
                                        _mm256_castsi256_ps(_mm256_cmpgt_epi32(x.b, y.b))));
}
inline __mmask16 _mm512_cmpge_epi32_mask(__m512i x, __m512i y) { return static_cast<__mmask16>(~greater(y, x)); }
inline __mmask16 _mm512_cmple_epi32_mask(__m512i x, __m512i y) { return static_cast<__mmask16>(~greater(x, y)); }
template <int predicate>
inline __mmask16 compared(__m512 x, __m512 y) {
  return static_cast<__mmask16>(bits_of(_mm256_cmp_ps(x.a, y.a, predicate), _mm256_cmp_ps(x.b, y.b, predicate)));
}
#define _mm512_cmp_ps_mask(x, y, predicate) compared<predicate>(x, y)

// y where the mask has a one.
inline __m256 blended(int mask, __m256 x, __m256 y) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i chosen = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(mask), bits), bits);
  return _mm256_blendv_ps(x, y, _mm256_castsi256_ps(chosen));
}
inline __m512 _mm512_mask_blend_ps(__mmask16 mask, __m512 x, __m512 y) {
  return {blended(mask, x.a, y.a), blended(mask >> 8, x.b, y.b)};
}

// These three are no instructions; folded by halves, the upper one first, as GCC does.
inline float _mm512_reduce_max_ps(__m512 x) {
  const __m256 m = _mm256_max_ps(x.b, x.a);
  __m128 v = _mm_max_ps(_mm256_extractf128_ps(m, 1), _mm256_castps256_ps128(m));
  v = _mm_max_ps(v, _mm_permute_ps(v, 0x4e));
  return _mm_cvtss_f32(_mm_max_ps(v, _mm_permute_ps(v, 0xb1)));
}
inline int _mm512_reduce_max_epi32(__m512i x) {
  const __m256i m = _mm256_max_epi32(x.b, x.a);
  __m128i v = _mm_max_epi32(_mm256_extracti128_si256(m, 1), _mm256_castsi256_si128(m));
  v = _mm_max_epi32(v, _mm_shuffle_epi32(v, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
}
inline int _mm512_reduce_add_epi32(__m512i x) {
  const __m256i s = _mm256_add_epi32(x.b, x.a);
  __m128i v = _mm_add_epi32(_mm256_extracti128_si256(s, 1), _mm256_castsi256_si128(s));
  v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
}

}  // namespace
}  // namespace pagetrie
