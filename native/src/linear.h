// Products of quantised rows with packed matrices, and the row operations around them, one set of kernels per
// instruction set. All sets give the same bits: group sums are exact integers, fp32 operations and their order are
// fixed, and a row's result depends on no other row.
#pragma once

#include <cstdint>

#include "cpu.h"
#include "quantize.h"

namespace pagetrie {

// What becomes of a product: y = acc + bias, then
//   store: out = y;  add: out += y (a residual);
//   swiglu: panels come in pairs, gate and up: out = silu(gate) * up, with half as many columns.
struct Epilogue {
  enum class Kind { store, add, swiglu };
  Kind kind = Kind::store;
  float* out = nullptr;  // row 0, column 0
  int64_t stride = 0;    // floats from row to row
  int64_t columns = 0;   // of out; panels are cut there
};

struct LinearKernels {
  bool wide_q8;  // whether q8 products take wide rows

  // Rows 0 .. rows-1 of x times panels first .. last-1 (both even with swiglu).
  void (*multiply)(const PackedMatrix& matrix, const QuantizedRows& x, int64_t rows, int64_t first, int64_t last,
          const Epilogue& epilogue);
  // Quantise rows of k floats.
  void (*quantize)(const float* x, int64_t stride, int64_t rows, int64_t k, const QuantizedRows& out);
  // RMSNorm (x / rms(x) * weight), then quantise.
  void (*norm_quantize)(const float* x, int64_t stride, int64_t rows, int64_t k, const float* weight, float eps,
             const QuantizedRows& out);
  // RMSNorm of each head in place; weight [heads, head_dim], row r's heads at x + r * stride.
  void (*head_norm)(float* x, int64_t heads, int64_t head_dim, const float* weight, float eps);
  // One row of a packed matrix as floats, k of them (an embedding).
  void (*dequantize_row)(const PackedMatrix& matrix, int64_t row, float* out);

  bool wide(Format format) const { return wide_q8 && format == Format::q8; }
};

const LinearKernels& linear_kernels_portable();
#if defined(__x86_64__)
const LinearKernels& linear_kernels_avx2();
const LinearKernels& linear_kernels_avx512();
#endif

// Those of the instruction set in use.
inline const LinearKernels& linear_kernels() {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return linear_kernels_avx512();
  if (isa() == Isa::avx2) return linear_kernels_avx2();
#endif
  return linear_kernels_portable();
}

}  // namespace pagetrie
