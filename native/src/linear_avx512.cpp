// Kernels for AVX-512 with VNNI: vpdpbusd sums four u8 x s8 products into int32, so nothing can overflow.

#include "simd_avx512.h"
#include "simd_int.h"
#include "linear_rows.inl"

namespace pagetrie {
namespace {

template <bool q4, int R>
void tile(const PackedMatrix& matrix, const uint8_t* block, const QuantizedRows& x, float* acc) {
  constexpr int64_t block_bytes = PackedMatrix::block_bytes(q4 ? Format::q4 : Format::q8);
  const __m512i low = _mm512_set1_epi8(15), offset = _mm512_set1_epi8(static_cast<char>(0x80));
  const int64_t groups = matrix.groups;
  __m512 f[R];
  for (int r = 0; r < R; r++) f[r] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; g++, block += block_bytes) {
    for (int64_t line = 0; line < block_bytes; line += 64)
      prefetch(block + 1536 + line);
    __m512i s[R];
    // q8 weights are taken as w + 128, which adds 128 times the sum of the row's values.
    for (int r = 0; r < R; r++)
      s[r] = q4 ? _mm512_setzero_si512() : _mm512_set1_epi32(-128 * x.sum[r * groups + g]);
    const uint8_t* a = x.values + g * kGroup;
    auto add_products = [&](__m512i w, int at) {
      for (int r = 0; r < R; r++) {
        int32_t four;
        std::memcpy(&four, a + r * groups * kGroup + at, 4);
        s[r] = _mm512_dpbusd_epi32(s[r], w, _mm512_set1_epi32(four));
      }
    };
    for (int j = 0; j < (q4 ? 4 : 8); j++) {
      const __m512i v = _mm512_loadu_si512(block + 64 * j);
      if (q4) {
        add_products(_mm512_and_si512(v, low), 4 * j);
        add_products(_mm512_and_si512(_mm512_srli_epi16(v, 4), low), 16 + 4 * j);
      } else {
        add_products(_mm512_xor_si512(v, offset), 4 * j);
      }
    }
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(block + (q4 ? 256 : 512));
    const __m512 d = load(scales).v;
    for (int r = 0; r < R; r++) {
      const __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(x.scale[r * groups + g]));
      f[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(s[r]), scale, f[r]);
    }
    if (q4) {
      const __m512 m = load(scales + kPanel).v;
      for (int r = 0; r < R; r++)
        f[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(x.scaled_sum[r * groups + g]), f[r]);
    }
  }
  for (int r = 0; r < R; r++) _mm512_storeu_ps(acc + r * kPanel, f[r]);
}

template <bool q4>
void sums(const PackedMatrix& matrix, const QuantizedRows& x, int64_t rows, int64_t panel, float* acc) {
  const uint8_t* block = matrix.panel(panel);
  int64_t row = 0;
  for (; row + 8 <= rows; row += 8) tile<q4, 8>(matrix, block, x.from_row(row), acc + row * kPanel);
  switch (rows - row) {
    case 1: return tile<q4, 1>(matrix, block, x.from_row(row), acc + row * kPanel);
    case 2: return tile<q4, 2>(matrix, block, x.from_row(row), acc + row * kPanel);
    case 3: return tile<q4, 3>(matrix, block, x.from_row(row), acc + row * kPanel);
    case 4: return tile<q4, 4>(matrix, block, x.from_row(row), acc + row * kPanel);
    case 5: return tile<q4, 5>(matrix, block, x.from_row(row), acc + row * kPanel);
    case 6: return tile<q4, 6>(matrix, block, x.from_row(row), acc + row * kPanel);
    case 7: return tile<q4, 7>(matrix, block, x.from_row(row), acc + row * kPanel);
  }
}

void multiply(const PackedMatrix& matrix, const QuantizedRows& x, int64_t rows, int64_t first, int64_t last,
          const Epilogue& epilogue) {
  if (matrix.format == Format::q4)
    for_panels(matrix, x, rows, first, last, epilogue, sums<true>);
  else
    for_panels(matrix, x, rows, first, last, epilogue, sums<false>);
}

constexpr LinearKernels kKernels = make_kernels(multiply);

}  // namespace

const LinearKernels& linear_kernels_avx512() { return kKernels; }

}  // namespace pagetrie
