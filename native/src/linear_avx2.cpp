// Kernels for AVX2, FMA and F16C.
//
// q4: weights are 0..15, so vpmaddubsw's pair sums stay within 15 * 127 * 2 = 3810 and eight of them within int16: a
// group takes eight multiplications, seven 16-bit additions and one widening.
// q8: two int8 products in int16 may overflow, so both sides are widened to int16 for vpmaddwd.

#include <type_traits>
#include <utility>

#include "simd_avx2.h"
#include "simd_int.h"
#include "linear_rows.inl"

namespace pagetrie {
namespace {

inline __m256i load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m256i spread(const void* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}
// Holds sums in their registers at this point: left to itself the compiler collects products first and runs out of them.
inline __attribute__((always_inline)) void keep(__m256i& a, __m256i& b) { asm("" : "+x"(a), "+x"(b)); }
inline __m256 halves(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// Groups of a panel, unpacked for many rows: weights as the multiplier takes them, then scales (and minima) in fp32.
constexpr int64_t kAhead = 1536;  // bytes fetched ahead of a one-row product
constexpr int kChunk = 16;  // groups unpacked at a time; with 8 or 16 KiB of weights they stay in the L1 cache
struct Unpacked {
  alignas(64) uint8_t weights[kChunk * 1024];
  alignas(64) float scale[kChunk][kPanel];
  alignas(64) float least[kChunk][kPanel];
};

struct Q4 {
  static constexpr int64_t row_group_bytes = kGroup;
  static constexpr int64_t packed_bytes = 256;
  static constexpr int64_t weight_bytes = 512;

  static void unpack(const uint8_t* block, Unpacked& to, int at) {
    const __m256i low = _mm256_set1_epi8(15);
    uint8_t* w = to.weights + at * weight_bytes;
    for (int i = 0; i < 256; i += 32) {
      const __m256i v = load_bytes(block + i);
      _mm256_store_si256(reinterpret_cast<__m256i*>(w + i), _mm256_and_si256(v, low));
      _mm256_store_si256(reinterpret_cast<__m256i*>(w + 256 + i),
               _mm256_and_si256(_mm256_srli_epi16(v, 4), low));
    }
    for (int i = 0; i < 16; i += 8) {
      _mm256_store_ps(to.scale[at] + i, halves(block + 256 + 2 * i));
      _mm256_store_ps(to.least[at] + i, halves(block + 288 + 2 * i));
    }
  }

  // The integer sums of a group: a row per r by two vectors of eight columns. (Packs, not loops, since the compiler
  // keeps an array in registers only if its indices are constants from the start.)
  template <bool packed, int... r>
  static inline __attribute__((always_inline)) void dot(const uint8_t* w, const uint8_t* const* a, __m256i* even,
                             __m256i* odd, std::integer_sequence<int, r...>) {
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i s[sizeof...(r)], t[sizeof...(r)];
    ((s[r] = t[r] = _mm256_setzero_si256()), ...);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const auto step = [&](int at, __m256i u, __m256i v, const uint8_t* from, __m256i& p, __m256i& q)
                 __attribute__((always_inline)) {
        const __m256i x = spread(from + at);
        p = _mm256_add_epi16(p, _mm256_maddubs_epi16(u, x));
        q = _mm256_add_epi16(q, _mm256_maddubs_epi16(v, x));
        keep(p, q);
      };
      __m256i u = load_bytes(w + 64 * j), v = load_bytes(w + 64 * j + 32);
      __m256i u_high, v_high;
      if (packed) {
        u_high = _mm256_and_si256(_mm256_srli_epi16(u, 4), low);
        v_high = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
        u = _mm256_and_si256(u, low);
        v = _mm256_and_si256(v, low);
      }
      keep(u, v);
      (step(4 * j, u, v, a[r], s[r], t[r]), ...);
      if (!packed) {
        u_high = load_bytes(w + 256 + 64 * j);
        v_high = load_bytes(w + 256 + 64 * j + 32);
      }
      keep(u_high, v_high);
      (step(16 + 4 * j, u_high, v_high, a[r], s[r], t[r]), ...);
    }
    ((even[r] = _mm256_madd_epi16(s[r], ones), odd[r] = _mm256_madd_epi16(t[r], ones)), ...);
  }
};

struct Q8 {
  static constexpr int64_t row_group_bytes = 2 * kGroup;
  static constexpr int64_t packed_bytes = 512;
  static constexpr int64_t weight_bytes = 1024;

  static inline __m256i even(__m256i v) { return _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8); }
  static inline __m256i odd(__m256i v) { return _mm256_srai_epi16(v, 8); }

  static void unpack(const uint8_t* block, Unpacked& to, int at) {
    uint8_t* w = to.weights + at * weight_bytes;
    for (int j = 0; j < 8; j++) {
      const __m256i v0 = load_bytes(block + 64 * j), v1 = load_bytes(block + 64 * j + 32);
      __m256i* out = reinterpret_cast<__m256i*>(w + 128 * j);
      _mm256_store_si256(out, even(v0));
      _mm256_store_si256(out + 1, even(v1));
      _mm256_store_si256(out + 2, odd(v0));
      _mm256_store_si256(out + 3, odd(v1));
    }
    for (int i = 0; i < 16; i += 8) _mm256_store_ps(to.scale[at] + i, halves(block + 512 + 2 * i));
  }

  template <bool packed, int... r>
  static inline __attribute__((always_inline)) void dot(const uint8_t* w, const uint8_t* const* a, __m256i* s,
                             __m256i* t, std::integer_sequence<int, r...>) {
    ((s[r] = t[r] = _mm256_setzero_si256()), ...);
#pragma GCC unroll 2
    for (int j = 0; j < 8; j++) {
      const auto step = [&](int at, __m256i u, __m256i v, const uint8_t* from, __m256i& p, __m256i& q)
                 __attribute__((always_inline)) {
        const __m256i x = spread(from + at);
        p = _mm256_add_epi32(p, _mm256_madd_epi16(u, x));
        q = _mm256_add_epi32(q, _mm256_madd_epi16(v, x));
        keep(p, q);
      };
      __m256i u, v, u_odd, v_odd;
      if (packed) {
        u_odd = load_bytes(w + 64 * j);
        v_odd = load_bytes(w + 64 * j + 32);
        u = even(u_odd);
        v = even(v_odd);
        u_odd = odd(u_odd);
        v_odd = odd(v_odd);
      } else {
        u = load_bytes(w + 128 * j);
        v = load_bytes(w + 128 * j + 32);
      }
      keep(u, v);
      (step(8 * j, u, v, a[r], s[r], t[r]), ...);
      if (!packed) {
        u_odd = load_bytes(w + 128 * j + 64);
        v_odd = load_bytes(w + 128 * j + 96);
      }
      keep(u_odd, v_odd);
      (step(8 * j + 4, u_odd, v_odd, a[r], s[r], t[r]), ...);
    }
  }
};

template <int R>
using RowsOf = std::make_integer_sequence<int, R>;

// Sums of R rows by a panel, straight from its packed form: for few rows, where reading the weights is the cost.
template <class Q, int... r>
void packed_tile(const PackedMatrix& matrix, const uint8_t* block, const QuantizedRows& x, float* acc,
            std::integer_sequence<int, r...> rows) {
  constexpr int R = sizeof...(r);
  constexpr bool q4 = std::is_same<Q, Q4>::value;
  constexpr int64_t block_bytes = PackedMatrix::block_bytes(q4 ? Format::q4 : Format::q8);
  const int64_t groups = matrix.groups, row_bytes = x.row_bytes();
  __m256 f[R], h[R];
  ((f[r] = h[r] = _mm256_setzero_ps()), ...);
  const uint8_t* a[R];
  ((a[r] = x.values + r * row_bytes), ...);
  for (int64_t g = 0; g < groups; g++, block += block_bytes) {
    for (int64_t line = 0; line < block_bytes; line += 64)
      prefetch(block + kAhead + line);
    __m256i s[R], t[R];
    Q::template dot<true>(block, a, s, t, rows);
    const uint8_t* scales = block + Q::packed_bytes;
    const __m256 d0 = halves(scales), d1 = halves(scales + 16);
    const auto scaled = [&](const float* scale, __m256i p, __m256i q, __m256& u, __m256& v)
                __attribute__((always_inline)) {
      const __m256 by = _mm256_set1_ps(*scale);
      u = _mm256_fmadd_ps(_mm256_cvtepi32_ps(p), _mm256_mul_ps(d0, by), u);
      v = _mm256_fmadd_ps(_mm256_cvtepi32_ps(q), _mm256_mul_ps(d1, by), v);
    };
    (scaled(x.scale + r * groups + g, s[r], t[r], f[r], h[r]), ...);
    if constexpr (q4) {
      const __m256 m0 = halves(scales + 32), m1 = halves(scales + 48);
      ((f[r] = _mm256_fmadd_ps(m0, _mm256_set1_ps(x.scaled_sum[r * groups + g]), f[r])), ...);
      ((h[r] = _mm256_fmadd_ps(m1, _mm256_set1_ps(x.scaled_sum[r * groups + g]), h[r])), ...);
    }
    ((a[r] += Q::row_group_bytes), ...);
  }
  ((_mm256_store_ps(acc + r * kPanel, f[r]), _mm256_store_ps(acc + r * kPanel + 8, h[r])), ...);
}

// Add an unpacked chunk of groups to R rows of sums. `later` is asked for meanwhile, a packed group per group.
template <class Q, int... r>
void unpacked_tile(const Unpacked& w, const QuantizedRows& x, int64_t first, int count, float* acc, const uint8_t* later,
             std::integer_sequence<int, r...> rows) {
  constexpr int R = sizeof...(r);
  constexpr bool q4 = std::is_same<Q, Q4>::value;
  const int64_t groups = x.groups, row_bytes = x.row_bytes();
  const uint8_t* a[R];
  ((a[r] = x.values + r * row_bytes + first * Q::row_group_bytes), ...);
  constexpr int64_t block_bytes = PackedMatrix::block_bytes(q4 ? Format::q4 : Format::q8);
  for (int g = 0; g < count; g++) {
    if (later)
      for (int64_t line = 0; line < block_bytes; line += 64) prefetch(later + g * block_bytes + line);
    __m256i s[R], t[R];
    Q::template dot<false>(w.weights + g * Q::weight_bytes, a, s, t, rows);
    const __m256 d0 = _mm256_load_ps(w.scale[g]), d1 = _mm256_load_ps(w.scale[g] + 8);
    const __m256 m0 = _mm256_load_ps(w.least[g]), m1 = _mm256_load_ps(w.least[g] + 8);
    const auto scaled = [&](int64_t at, __m256i p, __m256i q, float* to) __attribute__((always_inline)) {
      const __m256 by = _mm256_set1_ps(x.scale[at]);
      __m256 u = _mm256_fmadd_ps(_mm256_cvtepi32_ps(p), _mm256_mul_ps(d0, by), _mm256_load_ps(to));
      __m256 v = _mm256_fmadd_ps(_mm256_cvtepi32_ps(q), _mm256_mul_ps(d1, by), _mm256_load_ps(to + 8));
      if constexpr (q4) {
        const __m256 sum = _mm256_set1_ps(x.scaled_sum[at]);
        u = _mm256_fmadd_ps(m0, sum, u);
        v = _mm256_fmadd_ps(m1, sum, v);
      }
      _mm256_store_ps(to, u);
      _mm256_store_ps(to + 8, v);
    };
    (scaled(r * groups + first + g, s[r], t[r], acc + r * kPanel), ...);
    ((a[r] += Q::row_group_bytes), ...);
  }
}

template <class Q>
void sums(const PackedMatrix& matrix, const QuantizedRows& x, int64_t rows, int64_t panel, float* acc) {
  const uint8_t* block = matrix.panel(panel);
  switch (rows) {
    case 1: return packed_tile<Q>(matrix, block, x, acc, RowsOf<1>());
    case 2: return packed_tile<Q>(matrix, block, x, acc, RowsOf<2>());
    case 3: return packed_tile<Q>(matrix, block, x, acc, RowsOf<3>());
    case 4: return packed_tile<Q>(matrix, block, x, acc, RowsOf<4>());
  }
  std::memset(acc, 0, sizeof(float) * rows * kPanel);
  Unpacked w;
  for (int64_t first = 0; first < matrix.groups; first += kChunk) {
    const int count = static_cast<int>(matrix.groups - first < kChunk ? matrix.groups - first : kChunk);
    for (int g = 0; g < count; g++, block += matrix.block_bytes()) Q::unpack(block, w, g);
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4)
      unpacked_tile<Q>(w, x.from_row(row), first, count, acc + row * kPanel, row ? nullptr : block, RowsOf<4>());
    switch (rows - row) {
      case 1: unpacked_tile<Q>(w, x.from_row(row), first, count, acc + row * kPanel, nullptr, RowsOf<1>()); break;
      case 2: unpacked_tile<Q>(w, x.from_row(row), first, count, acc + row * kPanel, nullptr, RowsOf<2>()); break;
      case 3: unpacked_tile<Q>(w, x.from_row(row), first, count, acc + row * kPanel, nullptr, RowsOf<3>()); break;
    }
  }
}

void multiply(const PackedMatrix& matrix, const QuantizedRows& x, int64_t rows, int64_t first, int64_t last,
          const Epilogue& epilogue) {
  if (matrix.format == Format::q4)
    for_panels(matrix, x, rows, first, last, epilogue, sums<Q4>);
  else
    for_panels(matrix, x, rows, first, last, epilogue, sums<Q8>);
}

constexpr LinearKernels kKernels = make_kernels(multiply);

}  // namespace

const LinearKernels& linear_kernels_avx2() { return kKernels; }

}  // namespace pagetrie
