// What Python sees of quantised matrices.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

#include "arrays.h"
#include "linear.h"
#include "team.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pagetrie {

namespace {

using Shared = std::shared_ptr<PackedMatrix>;

const float* float_array(const char* name, const Array& array, size_t dimensions) {
  if (array.ndim() != dimensions || array.dtype() != nb::dtype<float>() || !contiguous_from(array, 0))
    refuse(name, "contiguous float32 of " + std::to_string(dimensions) + " dimensions", array);
  return static_cast<const float*>(array.data());
}

void set_bias(PackedMatrix& matrix, const std::optional<Array>& bias) {
  if (!bias) return;
  const float* values = float_array("bias", *bias, 1);
  if (static_cast<int64_t>(bias->shape(0)) != matrix.n)
    refuse("bias", "of " + std::to_string(matrix.n) + " values", *bias);
  matrix.bias.assign(static_cast<size_t>(matrix.panels * kPanel), 0.0f);
  std::copy(values, values + matrix.n, matrix.bias.begin());
}

Shared from_floats(const Array& weight, const std::optional<Array>& bias) {
  const float* values = float_array("weight", weight, 2);
  if (weight.size() == 0) refuse("weight", "not empty", weight);
  Shared matrix;
  {
    const nb::gil_scoped_release release;
    matrix = std::make_shared<PackedMatrix>(
        pack_floats(values, static_cast<int64_t>(weight.shape(0)), static_cast<int64_t>(weight.shape(1))));
  }
  set_bias(*matrix, bias);
  return matrix;
}

Shared from_blocks(const Array& blocks, const std::string& kind, const std::optional<Array>& bias) {
  BlockType type;
  if (kind == "q4_0") type = BlockType::q4_0;
  else if (kind == "q4_1") type = BlockType::q4_1;
  else if (kind == "q8_0") type = BlockType::q8_0;
  else throw nb::value_error(("kind must be q4_0, q4_1 or q8_0, got " + kind).c_str());
  if (blocks.ndim() != 3 || blocks.dtype() != nb::dtype<uint8_t>() || !contiguous_from(blocks, 0) ||
      static_cast<int64_t>(blocks.shape(2)) != bytes_of(type) || blocks.size() == 0)
    refuse("blocks", "contiguous uint8 [rows, blocks, " + std::to_string(bytes_of(type)) + "]", blocks);
  Shared matrix;
  {
    const nb::gil_scoped_release release;
    matrix = std::make_shared<PackedMatrix>(pack_blocks(static_cast<const uint8_t*>(blocks.data()), type,
                                                        static_cast<int64_t>(blocks.shape(0)),
                                                        static_cast<int64_t>(blocks.shape(1)) * kGroup));
  }
  set_bias(*matrix, bias);
  return matrix;
}

// Memory for quantised rows, and the rows themselves.
struct OwnRows {
  OwnRows(int64_t count, int64_t groups, bool wide)
      : memory(static_cast<uint8_t*>(::operator new(bytes(count, groups), std::align_val_t(64)))),
        rows(QuantizedRows::in(memory.get(), count, groups, wide)) {}

  struct Delete {
    void operator()(uint8_t* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  static size_t bytes(int64_t count, int64_t groups) {
    return static_cast<size_t>(QuantizedRows::bytes_needed(count, groups));
  }

  std::unique_ptr<uint8_t, Delete> memory;
  QuantizedRows rows;
};

void multiply(const PackedMatrix& matrix, const Array& x, const Array& out) {
  const float* from = float_array("x", x, 2);
  float* to = const_cast<float*>(float_array("out", out, 2));
  if (static_cast<int64_t>(x.shape(1)) != matrix.k) refuse("x", "[rows, " + std::to_string(matrix.k) + "]", x);
  if (out.shape(0) != x.shape(0) || static_cast<int64_t>(out.shape(1)) != matrix.n)
    refuse("out", "[" + std::to_string(x.shape(0)) + ", " + std::to_string(matrix.n) + "]", out);
  const nb::gil_scoped_release release;
  const LinearKernels& kernels = linear_kernels();
  const int64_t count = static_cast<int64_t>(x.shape(0));
  const OwnRows own(count, matrix.groups, kernels.wide(matrix.format));
  together(max_threads(), [&](Team& team) {
    team.share(count, 1, [&](int64_t first, int64_t last) {
      kernels.quantize(from + first * matrix.k, matrix.k, last - first, matrix.k, own.rows.from_row(first));
    });
    const Epilogue epilogue{Epilogue::Kind::store, to, matrix.n, matrix.n};
    team.share(matrix.panels, 1, [&](int64_t first, int64_t last) {
      kernels.multiply(matrix, own.rows, count, first, last, epilogue);
    });
  });
}

void dequantize(const PackedMatrix& matrix, const Array& out) {
  float* to = const_cast<float*>(float_array("out", out, 2));
  if (static_cast<int64_t>(out.shape(0)) != matrix.n || static_cast<int64_t>(out.shape(1)) != matrix.k)
    refuse("out", "[" + std::to_string(matrix.n) + ", " + std::to_string(matrix.k) + "]", out);
  const nb::gil_scoped_release release;
  for (int64_t row = 0; row < matrix.n; row++) linear_kernels().dequantize_row(matrix, row, to + row * matrix.k);
}

void quantize_rows(const Array& x, const Array& values, const Array& scales) {
  const float* from = float_array("x", x, 2);
  const int64_t count = static_cast<int64_t>(x.shape(0)), k = static_cast<int64_t>(x.shape(1));
  const int64_t groups = (k + kGroup - 1) / kGroup;
  float* to_scales = const_cast<float*>(float_array("scales", scales, 2));
  if (static_cast<int64_t>(scales.shape(0)) != count || static_cast<int64_t>(scales.shape(1)) != groups)
    refuse("scales", "[" + std::to_string(count) + ", " + std::to_string(groups) + "]", scales);
  if (values.ndim() != 2 || values.dtype() != nb::dtype<int8_t>() || !contiguous_from(values, 0) ||
      static_cast<int64_t>(values.shape(0)) != count || static_cast<int64_t>(values.shape(1)) != groups * kGroup)
    refuse("values", "contiguous int8 [" + std::to_string(count) + ", " + std::to_string(groups * kGroup) + "]", values);
  const OwnRows own(count, groups, false);
  linear_kernels().quantize(from, k, count, k, own.rows);
  std::memcpy(values.data(), own.rows.values, static_cast<size_t>(count * groups * kGroup));
  std::memcpy(to_scales, own.rows.scale, static_cast<size_t>(count * groups) * sizeof(float));
}

}  // namespace

void bind_linear(nb::module_& m) {
  nb::class_<PackedMatrix>(m, "QuantizedMatrix", "Weights of 8 or 4 bits in groups of 32 along the inputs, packed.")
      .def_static("from_floats", &from_floats, "weight"_a.noconvert(), "bias"_a.noconvert() = nb::none(),
                  "Quantise float32 [out_features, in_features] to 8 bits.")
      .def_static("from_blocks", &from_blocks, "blocks"_a.noconvert(), "kind"_a, "bias"_a.noconvert() = nb::none(),
                  "Pack a GGUF tensor's blocks, uint8 [out_features, in_features / 32, bytes], as they are.")
      .def_ro("out_features", &PackedMatrix::n)
      .def_ro("in_features", &PackedMatrix::k)
      .def_prop_ro("bits", [](const PackedMatrix& matrix) { return matrix.format == Format::q4 ? 4 : 8; })
      .def_prop_ro("nbytes", [](const PackedMatrix& matrix) { return matrix.bytes(); })
      .def("multiply", &multiply, "x"_a.noconvert(), "out"_a.noconvert(),
           "out = x @ weights.T + bias, x quantised per row in groups of 32.")
      .def("dequantize", &dequantize, "out"_a.noconvert(), "The weights as float32 [out_features, in_features].");
  m.def("quantize_rows", &quantize_rows, "x"_a.noconvert(), "values"_a.noconvert(), "scales"_a.noconvert(),
        "Quantise rows of activations as `multiply` does: int8 values and a scale per group of 32.");
}

}  // namespace pagetrie
