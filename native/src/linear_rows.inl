// The row operations and epilogues of linear.h, written over the sixteen-lane types of a simd_*.h file and simd_int.h,
// which were included before. Each operation is one IEEE operation per lane, and reductions fold halves in a fixed order,
// so all instruction sets give the same bits.

#include <cstring>

#include "half.h"
#include "linear.h"

namespace pagetrie {
namespace {


// exp(x) = 2^n * exp(r), |r| <= ln(2) / 2, by the polynomial of Cephes' expf; about 1 ulp for -87 <= x <= 88.
inline V16 exp_lanes(V16 x) {
  const V16 magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const V16 t = fused(x, broadcast(1.44269504088896341f), magic);
  const V16 n = sub(t, magic);
  V16 r = fused(n, broadcast(-0.693359375f), x);
  r = fused(n, broadcast(2.12194440e-4f), r);
  V16 y = broadcast(1.9875691500e-4f);
  y = fused(y, r, broadcast(1.3981999507e-3f));
  y = fused(y, r, broadcast(8.3334519073e-3f));
  y = fused(y, r, broadcast(4.1665795894e-2f));
  y = fused(y, r, broadcast(1.6666665459e-1f));
  y = fused(y, r, broadcast(5.0000001201e-1f));
  y = add(fused(y, mul(r, r), r), broadcast(1.0f));
  return scale_exponent(y, t);
}

inline V16 silu(V16 x) {
  const V16 minus = mul(broadcast(-1.0f), at_least(broadcast(-87.0f), x));
  return div(x, add(broadcast(1.0f), exp_lanes(at_least(broadcast(-87.0f), minus))));
}

// One group of 32 values, its tail beyond `count` taken as zero.
inline void quantize_group(const float* x, int64_t count, const QuantizedRows& out, int64_t group) {
  float padded[kGroup] = {};
  if (count < kGroup) {
    for (int64_t i = 0; i < count; i++) padded[i] = x[i];
    x = padded;
  }
  const V16 a = load(x), b = load(x + 16);
  // As integers, the bits of magnitudes sort like the magnitudes, with NaN above all; no order of maxima loses it.
  const int32_t bits = max_lane(at_least(magnitude_bits(a), magnitude_bits(b)));
  float largest;
  std::memcpy(&largest, &bits, 4);
  float scale = largest / 127.0f, inverse = 127.0f / largest;
  if (bits >= 0x7f800000) {
    scale = __builtin_nanf("");
    inverse = 0.0f;
  } else if (largest < 1e-30f) {
    scale = inverse = 0.0f;
  }
  I16 p = no_int(), q = p;
  if (bits < 0x7f800000) {
    p = nearest(mul(a, broadcast(inverse)));
    q = nearest(mul(b, broadcast(inverse)));
  }
  const int32_t total = sum_lanes(add(p, q));
  out.scale[group] = scale;
  out.sum[group] = total;
  out.scaled_sum[group] = scale * static_cast<float>(total);
  if (kWideQ8 && out.wide) {
    int16_t* to = reinterpret_cast<int16_t*>(out.values) + group * kGroup;
    store_wide(to, p);
    store_wide(to + 16, q);
    return;
  }
  int8_t* to = reinterpret_cast<int8_t*>(out.values) + group * kGroup;
  store_int8(to, p);
  store_int8(to + 16, q);
}

inline void quantize_row(const float* x, int64_t k, const QuantizedRows& out) {
  for (int64_t group = 0; group < out.groups; group++) {
    const int64_t left = k - group * kGroup;
    quantize_group(x + group * kGroup, left < kGroup ? left : kGroup, out, group);
  }
}

inline void quantize(const float* x, int64_t stride, int64_t rows, int64_t k, const QuantizedRows& out) {
  for (int64_t row = 0; row < rows; row++) quantize_row(x + row * stride, k, out.from_row(row));
}

inline float inverse_rms(const float* x, int64_t k, float eps) {
  V16 squares = zero();
  int64_t i = 0;
  for (; i + 16 <= k; i += 16) {
    const V16 v = load(x + i);
    squares = fused(v, v, squares);
  }
  float total = sum_lanes(squares);
  for (; i < k; i++) total = __builtin_fmaf(x[i], x[i], total);
  return 1.0f / __builtin_sqrtf(total / static_cast<float>(k) + eps);
}

inline void norm_row(const float* x, int64_t k, const float* weight, float eps, float* out) {
  const float inverse = inverse_rms(x, k, eps);
  int64_t i = 0;
  for (; i + 16 <= k; i += 16) store(out + i, mul(mul(load(x + i), broadcast(inverse)), load(weight + i)));
  for (; i < k; i++) out[i] = x[i] * inverse * weight[i];
}

inline void norm_quantize(const float* x, int64_t stride, int64_t rows, int64_t k, const float* weight, float eps,
             const QuantizedRows& out) {
  for (int64_t row = 0; row < rows; row++) {
    const float* from = x + row * stride;
    const QuantizedRows to = out.from_row(row);
    const float inverse = inverse_rms(from, k, eps);
    for (int64_t group = 0; group < out.groups; group++) {
      const int64_t at = group * kGroup, left = k - at, count = left < kGroup ? left : kGroup;
      float normed[kGroup];
      if (count == kGroup) {
        for (int i = 0; i < kGroup; i += 16)
          store(normed + i, mul(mul(load(from + at + i), broadcast(inverse)), load(weight + at + i)));
      } else {
        for (int64_t i = 0; i < count; i++) normed[i] = from[at + i] * inverse * weight[at + i];
      }
      quantize_group(normed, count, to, group);
    }
  }
}

inline void head_norm(float* x, int64_t heads, int64_t head_dim, const float* weight, float eps) {
  for (int64_t head = 0; head < heads; head++)
    norm_row(x + head * head_dim, head_dim, weight + head * head_dim, eps, x + head * head_dim);
}

inline void dequantize_row(const PackedMatrix& matrix, int64_t row, float* out) {
  const uint8_t* block = matrix.panel(row / kPanel);
  const int64_t column = row % kPanel;
  float values[kGroup];
  for (int64_t group = 0; group < matrix.groups; group++, block += matrix.block_bytes()) {
    const int64_t left = matrix.k - group * kGroup, count = left < kGroup ? left : kGroup;
    if (matrix.format == Format::q4) {
      const uint16_t* d = reinterpret_cast<const uint16_t*>(block + 256);
      const float scale = half_to_float(d[column]), least = half_to_float(d[16 + column]);
      for (int i = 0; i < 16; i++) {
        const uint8_t byte = block[(i / 4) * 64 + column * 4 + i % 4];
        values[i] = __builtin_fmaf(static_cast<float>(byte & 15), scale, least);
        values[16 + i] = __builtin_fmaf(static_cast<float>(byte >> 4), scale, least);
      }
    } else {
      const float scale = half_to_float(reinterpret_cast<const uint16_t*>(block + 512)[column]);
      const int8_t* q = reinterpret_cast<const int8_t*>(block);
      for (int i = 0; i < kGroup; i++)
        values[i] = static_cast<float>(q[(i / 4) * 64 + column * 4 + i % 4]) * scale;
    }
    for (int64_t i = 0; i < count; i++) out[group * kGroup + i] = values[i];
  }
}

inline void store_columns(float* out, V16 y, int64_t columns, bool adding) {
  if (columns >= kPanel) {
    store(out, adding ? add(load(out), y) : y);
    return;
  }
  float lanes[kPanel];
  store(lanes, y);
  for (int64_t i = 0; i < columns; i++) out[i] = adding ? out[i] + lanes[i] : lanes[i];
}

// Write out a panel's sums, [rows][16], of `gate` too where the epilogue takes pairs.
inline void finish(const PackedMatrix& matrix, int64_t panel, int64_t rows, const float* acc, const float* gate,
             const Epilogue& e) {
  const bool biased = !matrix.bias.empty();
  const V16 bias = biased ? load(matrix.bias.data() + panel * kPanel) : zero();
  const bool paired = e.kind == Epilogue::Kind::swiglu;
  const V16 gate_bias = biased && paired ? load(matrix.bias.data() + (panel - 1) * kPanel) : zero();
  const int64_t column = (paired ? panel / 2 : panel) * kPanel;
  for (int64_t row = 0; row < rows; row++) {
    V16 y = load(acc + row * kPanel);
    if (biased) y = add(y, bias);
    if (paired) {
      V16 g = load(gate + row * kPanel);
      if (biased) g = add(g, gate_bias);
      y = mul(silu(g), y);
    }
    store_columns(e.out + row * e.stride + column, y, e.columns - column, e.kind == Epilogue::Kind::add);
  }
}

// The loop over row blocks and panels; sums(matrix, x, rows, panel, acc) fills [rows][16].
template <class Sums>
inline void for_panels(const PackedMatrix& matrix, const QuantizedRows& x, int64_t rows, int64_t first,
               int64_t last, const Epilogue& epilogue, Sums sums) {
  alignas(64) float acc[2][kRowBlock * kPanel];
  const bool paired = epilogue.kind == Epilogue::Kind::swiglu;
  for (int64_t start = 0; start < rows; start += kRowBlock) {
    const int64_t count = rows - start < kRowBlock ? rows - start : kRowBlock;
    const QuantizedRows block = x.from_row(start);
    Epilogue e = epilogue;
    e.out += start * e.stride;
    for (int64_t panel = first; panel < last; panel++) {
      const bool gate = paired && panel % 2 == 0;
      sums(matrix, block, count, panel, acc[gate]);
      if (!gate) finish(matrix, panel, count, acc[0], acc[1], e);
    }
  }
}

template <class Multiply>
constexpr LinearKernels make_kernels(Multiply multiply) {
  return {kWideQ8, multiply, quantize, norm_quantize, head_norm, dequantize_row};
}

}  // namespace
}  // namespace pagetrie
