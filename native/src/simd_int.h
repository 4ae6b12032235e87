// Sixteen int32 at a time, and what else quantising needs beyond the simd_*.h file that was included before.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace pagetrie {
namespace {

#if defined(__AVX512F__)

constexpr bool kWideQ8 = false;  // see LinearKernels::wide_q8

struct I16 {
  __m512i v;
};

inline V16 fused(V16 x, V16 y, V16 z) { return fma(x, y, z); }
inline V16 div(V16 x, V16 y) { return {_mm512_div_ps(x.v, y.v)}; }
inline I16 no_int() { return {_mm512_setzero_si512()}; }
inline I16 add(I16 x, I16 y) { return {_mm512_add_epi32(x.v, y.v)}; }
inline I16 at_least(I16 x, I16 y) { return {_mm512_max_epi32(x.v, y.v)}; }
inline I16 magnitude_bits(V16 x) {
  return {_mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x7fffffff))};
}
inline I16 nearest(V16 x) { return {_mm512_cvtps_epi32(x.v)}; }
inline int32_t sum_lanes(I16 x) { return _mm512_reduce_add_epi32(x.v); }
inline int32_t max_lane(I16 x) { return _mm512_reduce_max_epi32(x.v); }
inline void store_int8(int8_t* to, I16 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x.v));
}
inline void store_wide(int16_t*, I16) {}

#elif defined(__AVX2__)

constexpr bool kWideQ8 = true;

struct I16 {
  __m256i a, b;
};

inline V16 fused(V16 x, V16 y, V16 z) { return fma(x, y, z); }
inline V16 div(V16 x, V16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline I16 no_int() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I16 add(I16 x, I16 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I16 at_least(I16 x, I16 y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
inline I16 magnitude_bits(V16 x) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  return {_mm256_and_si256(_mm256_castps_si256(x.a), mask), _mm256_and_si256(_mm256_castps_si256(x.b), mask)};
}
inline I16 nearest(V16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline int32_t sum_lanes(I16 x) {
  const __m256i half = _mm256_add_epi32(x.a, x.b);
  __m128i y = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}
inline int32_t max_lane(I16 x) {
  const __m256i half = _mm256_max_epi32(x.a, x.b);
  __m128i y = _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}
inline __m256i to_int16(I16 x) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8); }
inline void store_int8(int8_t* to, I16 x) {
  const __m256i narrow = to_int16(x);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm_packs_epi16(_mm256_castsi256_si128(narrow), _mm256_extracti128_si256(narrow, 1)));
}
inline void store_wide(int16_t* to, I16 x) {
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5, 2, 3, 6, 7,
                                         8, 9, 12, 13, 10, 11, 14, 15);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_shuffle_epi8(to_int16(x), order));
}

#else

constexpr bool kWideQ8 = false;

struct I16 {
  int32_t lane[16];
};

template <class Out, class F>
inline Out each_lane(F f) {
  Out out;
  for (int i = 0; i < 16; i++) out.lane[i] = f(i);
  return out;
}
inline V16 fused(V16 x, V16 y, V16 z) {
  return each_lane<V16>([&](int i) { return __builtin_fmaf(x.lane[i], y.lane[i], z.lane[i]); });
}
inline V16 div(V16 x, V16 y) {
  return each_lane<V16>([&](int i) { return x.lane[i] / y.lane[i]; });
}
inline I16 no_int() { return {}; }
inline I16 add(I16 x, I16 y) {
  return each_lane<I16>([&](int i) { return x.lane[i] + y.lane[i]; });
}
inline I16 at_least(I16 x, I16 y) {
  return each_lane<I16>([&](int i) { return x.lane[i] > y.lane[i] ? x.lane[i] : y.lane[i]; });
}
inline I16 magnitude_bits(V16 x) {
  return each_lane<I16>([&](int i) {
    int32_t bits;
    std::memcpy(&bits, &x.lane[i], 4);
    return bits & 0x7fffffff;
  });
}
inline I16 nearest(V16 x) {
  return each_lane<I16>([&](int i) { return static_cast<int32_t>(__builtin_nearbyintf(x.lane[i])); });
}
inline int32_t sum_lanes(I16 x) {
  int32_t total = 0;
  for (int32_t lane : x.lane) total += lane;
  return total;
}
inline int32_t max_lane(I16 x) {
  int32_t most = x.lane[0];
  for (int32_t lane : x.lane) most = lane > most ? lane : most;
  return most;
}
inline void store_int8(int8_t* to, I16 x) {
  for (int i = 0; i < 16; i++) to[i] = static_cast<int8_t>(x.lane[i]);
}
inline void store_wide(int16_t*, I16) {}

#endif

}  // namespace
}  // namespace pagetrie
