// Sixteen floats at a time, in plain C++. The other simd_*.h files give the same names for one instruction set each;
// a kernel includes one of them and is compiled once per set (see CMakeLists.txt for the rule on linkage).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"

namespace pagetrie {
namespace {

constexpr int kBlockRows = 2;  // with the sixteen registers of four that every x86-64 has: half of them hold sums

struct V16 {
  float lane[16];
};

#define PAGETRIE_EACH(expression)                 \
  V16 result;                                     \
  for (int i = 0; i < 16; i++) result.lane[i] = (expression); \
  return result

inline V16 load(const float* from) { PAGETRIE_EACH(from[i]); }
inline V16 load(const uint16_t* halves) { PAGETRIE_EACH(half_to_float(halves[i])); }
inline void store(float* to, V16 a) { std::memcpy(to, a.lane, sizeof a.lane); }
inline void store(uint16_t* halves, V16 a) {
  for (int i = 0; i < 16; i++) halves[i] = float_to_half(a.lane[i]);
}
inline V16 broadcast(float x) { PAGETRIE_EACH(x); }
inline V16 zero() { return broadcast(0.0f); }
inline V16 add(V16 a, V16 b) { PAGETRIE_EACH(a.lane[i] + b.lane[i]); }
inline V16 sub(V16 a, V16 b) { PAGETRIE_EACH(a.lane[i] - b.lane[i]); }
inline V16 mul(V16 a, V16 b) { PAGETRIE_EACH(a.lane[i] * b.lane[i]); }
inline V16 fma(V16 a, V16 b, V16 c) { PAGETRIE_EACH(a.lane[i] * b.lane[i] + c.lane[i]); }

// b, unless it is less than a; NaN in b stays.
inline V16 at_least(V16 a, V16 b) { PAGETRIE_EACH(b.lane[i] < a.lane[i] ? a.lane[i] : b.lane[i]); }

// a * 2^n, where n is the low bits of t = n + 1.5 * 2^23, |n| <= 126, and a is near 1.
inline V16 scale_exponent(V16 a, V16 t) {
  V16 result;
  for (int i = 0; i < 16; i++) {
    uint32_t bits, shift;
    std::memcpy(&bits, &a.lane[i], 4);
    std::memcpy(&shift, &t.lane[i], 4);
    bits += shift << 23;
    std::memcpy(&result.lane[i], &bits, 4);
  }
  return result;
}

inline bool any_greater(V16 a, V16 b) {
  bool any = false;
  for (int i = 0; i < 16; i++) any |= a.lane[i] > b.lane[i];
  return any;
}

// Lane i of a where low <= i <= high, else of b.
inline V16 select_range(int low, int high, V16 a, V16 b) { PAGETRIE_EACH(low <= i && i <= high ? a.lane[i] : b.lane[i]); }

inline float max_lane(V16 a) {
  float result = a.lane[0];
  for (int i = 1; i < 16; i++) result = a.lane[i] > result ? a.lane[i] : result;
  return result;
}

// Sums lanes pairwise: 8 apart, then 4, 2, 1.
inline float sum_lanes(V16 a) {
  for (int step = 8; step > 0; step /= 2)
    for (int i = 0; i < step; i++) a.lane[i] += a.lane[i + step];
  return a.lane[0];
}

// Multiplies pairs (x, y) of a, as complex numbers, by those of b.
inline V16 mul_complex(V16 a, V16 b) {
  V16 result;
  for (int i = 0; i < 16; i += 2) {
    result.lane[i] = a.lane[i] * b.lane[i] - a.lane[i + 1] * b.lane[i + 1];
    result.lane[i + 1] = a.lane[i] * b.lane[i + 1] + a.lane[i + 1] * b.lane[i];
  }
  return result;
}

inline void prefetch(const void* at) { __builtin_prefetch(at); }

#undef PAGETRIE_EACH

}  // namespace
}  // namespace pagetrie
