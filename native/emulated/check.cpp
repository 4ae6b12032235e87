// Compares the 512-bit intrinsics with definitions of one lane, on special and random bits. It is built over the
// emulation and, once more, over the compiler's own: where there are such instructions, they are held against the
// definitions too.

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>

namespace pagetrie {
namespace {

struct Lanes {
  uint32_t bits[16];
};

template <class To, class From>
To cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

Lanes lanes(__m512 x) {
  Lanes out;
  _mm512_storeu_ps(out.bits, x);
  return out;
}
Lanes lanes(__m512i x) { return lanes(_mm512_castsi512_ps(x)); }
__m512 floats(const Lanes& x) { return _mm512_loadu_ps(x.bits); }

// An unexpected lane ends the program.
template <class F>
void each(const char* name, const Lanes& got, const F& expected) {
  for (int i = 0; i < 16; i++) {
    const auto value = expected(i);
    if (got.bits[i] == cast<uint32_t>(value)) continue;
    std::printf("%s: lane %d is %08x, not %08x\n", name, i, got.bits[i], cast<uint32_t>(value));
    std::exit(1);
  }
}

// The same of arithmetic, which may give any NaN.
template <class F>
void each_number(const char* name, __m512 got, const F& expected) {
  Lanes known = lanes(got);
  const auto quiet = [](float x) { return std::isnan(x) ? std::numeric_limits<float>::quiet_NaN() : x; };
  for (uint32_t& lane : known.bits) lane = cast<uint32_t>(quiet(cast<float>(lane)));
  each(name, known, [&](int i) { return quiet(expected(i)); });
}

void equal(const char* name, int64_t got, int64_t expected) {
  if (got == expected) return;
  std::printf("%s: %lld, not %lld\n", name, static_cast<long long>(got), static_cast<long long>(expected));
  std::exit(1);
}

// IEEE 754 binary16, to the nearest, ties to even; NaN keeps its sign and upper bits and becomes quiet.
uint16_t to_half(float x) {
  const uint32_t bits = cast<uint32_t>(x), sign = bits >> 16 & 0x8000;
  if (std::isnan(x)) return static_cast<uint16_t>(sign | 0x7e00 | (bits >> 13 & 0x3ff));
  const double size = std::fabs(static_cast<double>(x));
  const int exponent = size < 0x1p-14 ? -14 : std::ilogb(size);
  const double steps = std::isinf(x) ? 0.0 : std::nearbyint(std::ldexp(size, 10 - exponent));
  const double largest = 65504.0;
  if (std::isinf(x) || std::ldexp(steps, exponent - 10) > largest) return static_cast<uint16_t>(sign | 0x7c00);
  // Below 1024 steps the number is subnormal; 2048 carry into the exponent.
  return static_cast<uint16_t>(sign + (static_cast<uint32_t>(exponent + 14) << 10) + static_cast<uint32_t>(steps));
}

float from_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff;
  if (exponent == 31) return cast<float>(sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0));
  const float size = exponent ? std::ldexp(1024.0f + static_cast<float>(fraction), static_cast<int>(exponent) - 25)
                              : std::ldexp(static_cast<float>(fraction), -24);
  return cast<float>(sign | cast<uint32_t>(size));
}

int32_t nearest(float x) {
  return x >= -0x1p31f && x < 0x1p31f ? static_cast<int32_t>(std::nearbyint(x)) : std::numeric_limits<int32_t>::min();
}

uint32_t dot(uint32_t sum, uint32_t x, uint32_t y) {
  for (int shift = 0; shift < 32; shift += 8)
    sum += static_cast<uint32_t>(static_cast<uint8_t>(x >> shift) * static_cast<int8_t>(y >> shift));
  return sum;
}

// Three rows of lanes through every intrinsic.
void check(const Lanes& p, const Lanes& q, const Lanes& r, uint16_t mask) {
  const auto x = [&](int i) { return cast<float>(p.bits[i]); };
  const auto y = [&](int i) { return cast<float>(q.bits[i]); };
  const auto z = [&](int i) { return cast<float>(r.bits[i]); };
  const auto m = [&](int i) { return static_cast<int32_t>(p.bits[i]); };
  const auto n = [&](int i) { return static_cast<int32_t>(q.bits[i]); };
  const __m512 a = floats(p), b = floats(q), c = floats(r);
  const __m512i s = _mm512_loadu_si512(p.bits), t = _mm512_loadu_si512(q.bits), u = _mm512_loadu_si512(r.bits);

  each("loadu_ps, storeu_ps", lanes(a), x);
  each("loadu_si512", lanes(s), m);
  each("castps_si512", lanes(_mm512_castps_si512(a)), x);
  each("setzero_ps", lanes(_mm512_setzero_ps()), [](int) { return 0; });
  each("setzero_si512", lanes(_mm512_setzero_si512()), [](int) { return 0; });
  each("set1_ps", lanes(_mm512_set1_ps(x(3))), [&](int) { return x(3); });
  each("set1_epi32", lanes(_mm512_set1_epi32(m(3))), [&](int) { return m(3); });
  each("set1_epi8", lanes(_mm512_set1_epi8(static_cast<char>(m(3)))),
       [&](int) { return (p.bits[3] & 255) * 0x01010101; });
  each("setr_epi32", lanes(_mm512_setr_epi32(m(0), m(1), m(2), m(3), m(4), m(5), m(6), m(7), m(8), m(9), m(10), m(11),
                                             m(12), m(13), m(14), m(15))), m);
  float half[16];
  _mm256_storeu_ps(half, _mm512_castps512_ps256(a));
  _mm256_storeu_ps(half + 8, _mm512_extractf32x8_ps(a, 1));
  each("castps512_ps256, extractf32x8_ps 1", lanes(_mm512_loadu_ps(half)), x);
  _mm256_storeu_ps(half + 8, _mm512_extractf32x8_ps(a, 0));
  each("extractf32x8_ps 0", lanes(_mm512_loadu_ps(half)), [&](int i) { return x(i % 8); });

  each_number("add_ps", _mm512_add_ps(a, b), [&](int i) { return x(i) + y(i); });
  each_number("sub_ps", _mm512_sub_ps(a, b), [&](int i) { return x(i) - y(i); });
  each_number("mul_ps", _mm512_mul_ps(a, b), [&](int i) { return x(i) * y(i); });
  each_number("div_ps", _mm512_div_ps(a, b), [&](int i) { return x(i) / y(i); });
  each_number("fmadd_ps", _mm512_fmadd_ps(a, b, c), [&](int i) { return std::fma(x(i), y(i), z(i)); });
  each_number("fmaddsub_ps", _mm512_fmaddsub_ps(a, b, c),
              [&](int i) { return std::fma(x(i), y(i), i % 2 ? z(i) : -z(i)); });
  each("max_ps", lanes(_mm512_max_ps(a, b)), [&](int i) { return x(i) > y(i) ? x(i) : y(i); });
  each("min_ps", lanes(_mm512_min_ps(a, b)), [&](int i) { return x(i) < y(i) ? x(i) : y(i); });
  each("movehdup_ps", lanes(_mm512_movehdup_ps(a)), [&](int i) { return x(i | 1); });
  each("moveldup_ps", lanes(_mm512_moveldup_ps(a)), [&](int i) { return x(i & ~1); });
  each("permute_ps b1", lanes(_mm512_permute_ps(a, 0xb1)),
       [&](int i) { return x((i & ~3) + (0xb1 >> 2 * (i % 4) & 3)); });
  each("permute_ps 2d", lanes(_mm512_permute_ps(a, 0x2d)),
       [&](int i) { return x((i & ~3) + (0x2d >> 2 * (i % 4) & 3)); });

  each("and_si512", lanes(_mm512_and_si512(s, t)), [&](int i) { return m(i) & n(i); });
  each("xor_si512", lanes(_mm512_xor_si512(s, t)), [&](int i) { return m(i) ^ n(i); });
  each("add_epi32", lanes(_mm512_add_epi32(s, t)), [&](int i) { return p.bits[i] + q.bits[i]; });
  each("max_epi32", lanes(_mm512_max_epi32(s, t)), [&](int i) { return m(i) > n(i) ? m(i) : n(i); });
  each("slli_epi32 23", lanes(_mm512_slli_epi32(s, 23)), [&](int i) { return p.bits[i] << 23; });
  each("slli_epi32 32", lanes(_mm512_slli_epi32(s, 32)), [&](int) { return 0; });
  each("srli_epi16 4", lanes(_mm512_srli_epi16(s, 4)), [&](int i) { return p.bits[i] >> 4 & 0x0fff0fff; });
  each("dpbusd_epi32", lanes(_mm512_dpbusd_epi32(u, s, t)),
       [&](int i) { return dot(r.bits[i], p.bits[i], q.bits[i]); });

  each("cvtepi32_ps", lanes(_mm512_cvtepi32_ps(s)), [&](int i) { return static_cast<float>(m(i)); });
  each("cvtps_epi32", lanes(_mm512_cvtps_epi32(a)), [&](int i) { return nearest(x(i)); });
  uint16_t halves[16];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(halves), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
  for (int i = 0; i < 16; i++) equal("cvtps_ph", halves[i], to_half(x(i)));
  std::memcpy(halves, p.bits, sizeof halves);
  each("cvtph_ps", lanes(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)))),
       [&](int i) { return from_half(halves[i]); });
  int8_t bytes[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), _mm512_cvtepi32_epi8(s));
  for (int i = 0; i < 16; i++) equal("cvtepi32_epi8", bytes[i], static_cast<int8_t>(p.bits[i]));

  const uint32_t more = _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), least = _mm512_cmpge_epi32_mask(s, t),
                 most = _mm512_cmple_epi32_mask(s, t);
  int32_t largest = m(0);
  float greatest = x(0);
  uint32_t total = 0;
  bool nan = false;
  for (int i = 0; i < 16; i++) {
    equal("cmp_ps_mask", more >> i & 1, x(i) > y(i));
    equal("cmpge_epi32_mask", least >> i & 1, m(i) >= n(i));
    equal("cmple_epi32_mask", most >> i & 1, m(i) <= n(i));
    if (m(i) > largest) largest = m(i);
    if (x(i) > greatest) greatest = x(i);
    nan |= std::isnan(x(i));
    total += p.bits[i];
  }
  equal("masks", more >> 16 | least >> 16 | most >> 16, 0);
  each("mask_blend_ps", lanes(_mm512_mask_blend_ps(mask, a, b)), [&](int i) { return mask >> i & 1 ? y(i) : x(i); });
  equal("reduce_max_epi32", _mm512_reduce_max_epi32(s), largest);
  equal("reduce_add_epi32", _mm512_reduce_add_epi32(s), static_cast<int32_t>(total));
  // Which lane wins where zeros have two signs or one is NaN depends on the order, which is left open.
  if (!nan) equal("reduce_max_ps", _mm512_reduce_max_ps(a) == greatest, true);
}

__attribute__((noinline)) void check_all() {
  const float special[] = {0.0f, 1.0f, 1.5f, 2.5f, 127.0f, 65504.0f, 65519.99f, 65520.0f, 0x1p-14f, 0x1p-24f, 0x1p-25f,
                           0x1.8p-25f, 0x1.004p0f, 0x1.00cp0f, 0x1p31f, 0x1.fffffep30f, 0x1.fffffep127f, 0x1p-149f};
  std::mt19937 random(1);
  const auto draw = [&](uint32_t kind) -> uint32_t {
    const uint32_t sign = random() & 0x80000000;
    switch (kind % 8) {
      case 0: return random();
      case 1: return sign | 0x7f800000 | (random() & 3 ? 0 : random() & 0x7fffff);  // infinities and NaN
      case 2: return sign | (random() & 0x3fffff);                                 // subnormal
      case 3: return cast<uint32_t>(static_cast<float>(static_cast<int32_t>(random()) / 1024) / 64.0f);
      case 4: return random() & 1 ? 0x80ff7f00 : 0xffffffff;  // extreme bytes
      default: return sign | cast<uint32_t>(special[random() % (sizeof special / sizeof *special)]);
    }
  };
  for (int round = 0; round < 20000; round++) {
    Lanes rows[3];
    for (Lanes& row : rows) {
      const bool all_kinds = random() % 2;  // rows of numbers alone too
      for (uint32_t& lane : row.bits) lane = draw(all_kinds ? random() : 2 + random() % 6);
    }
    check(rows[0], rows[1], rows[2], static_cast<uint16_t>(random()));
  }
}

}  // namespace
}  // namespace pagetrie

int main() {
#ifndef PAGETRIE_EMULATE_AVX512
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))) {
    std::puts("AVX-512 instructions: none here, not checked");
    return 0;
  }
  pagetrie::check_all();
  std::puts("AVX-512 instructions: as defined");
#else
  pagetrie::check_all();
  std::puts("emulated AVX-512 intrinsics: as defined");
#endif
}
