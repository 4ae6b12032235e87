// Kernels in plain C++: the reference for the others, and what machines without AVX2 run.

#include "simd_portable.h"
#include "simd_int.h"
#include "linear_rows.inl"

namespace pagetrie {
namespace {

void sums(const PackedMatrix& matrix, const QuantizedRows& x, int64_t rows, int64_t panel, float* acc) {
  const bool four_bits = matrix.format == Format::q4;
  for (int64_t row = 0; row < rows; row++) {
    const QuantizedRows a = x.from_row(row);
    const uint8_t* block = matrix.panel(panel);
    float* out = acc + row * kPanel;
    for (int column = 0; column < kPanel; column++) out[column] = 0.0f;
    for (int64_t group = 0; group < matrix.groups; group++, block += matrix.block_bytes()) {
      const int8_t* q = reinterpret_cast<const int8_t*>(a.values) + group * kGroup;
      const uint16_t* d = reinterpret_cast<const uint16_t*>(block + (four_bits ? 256 : 512));
      for (int column = 0; column < kPanel; column++) {
        int32_t total = 0;
        if (four_bits) {
          for (int i = 0; i < 16; i++) {
            const int byte = block[(i / 4) * 64 + column * 4 + i % 4];
            total += (byte & 15) * q[i] + (byte >> 4) * q[16 + i];
          }
        } else {
          const int8_t* w = reinterpret_cast<const int8_t*>(block);
          for (int i = 0; i < kGroup; i++) total += w[(i / 4) * 64 + column * 4 + i % 4] * q[i];
        }
        const float scale = half_to_float(d[column]) * a.scale[group];
        out[column] = __builtin_fmaf(static_cast<float>(total), scale, out[column]);
        if (four_bits)
          out[column] = __builtin_fmaf(half_to_float(d[16 + column]), a.scaled_sum[group], out[column]);
      }
    }
  }
}

void multiply(const PackedMatrix& matrix, const QuantizedRows& x, int64_t rows, int64_t first, int64_t last,
          const Epilogue& epilogue) {
  for_panels(matrix, x, rows, first, last, epilogue, sums);
}

constexpr LinearKernels kKernels = make_kernels(multiply);

}  // namespace

const LinearKernels& linear_kernels_portable() { return kKernels; }

}  // namespace pagetrie
