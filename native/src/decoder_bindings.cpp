// What Python sees of the decoder over quantised weights.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "arrays.h"
#include "bound_pages.h"
#include "decoder.h"
#include "threads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pagetrie {

namespace {

using Shared = std::shared_ptr<PackedMatrix>;

std::vector<float> floats(const char* name, const Array& array) {
  if (array.dtype() != nb::dtype<float>() || !contiguous_from(array, 0)) refuse(name, "contiguous float32", array);
  const float* values = static_cast<const float*>(array.data());
  return std::vector<float>(values, values + array.size());
}

float* float_matrix(const char* name, const Array& array, int64_t rows, int64_t columns) {
  if (array.ndim() != 2 || array.dtype() != nb::dtype<float>() || !contiguous_from(array, 0) ||
      static_cast<int64_t>(array.shape(0)) != rows || static_cast<int64_t>(array.shape(1)) != columns)
    refuse(name, "contiguous float32 [" + std::to_string(rows) + ", " + std::to_string(columns) + "]", array);
  return static_cast<float*>(array.data());
}

void forward(QuantizedDecoder& decoder, const AttentionPlan& plan, BoundPages& pages, const Array& token_ids,
             const Array& rotations, const Array& hidden) {
  const int64_t tokens = plan.tokens();
  if (token_ids.ndim() != 1 || token_ids.dtype() != nb::dtype<int64_t>() || !contiguous_from(token_ids, 0) ||
      static_cast<int64_t>(token_ids.shape(0)) != tokens)
    refuse("token_ids", "a contiguous vector of " + std::to_string(tokens) + " int64", token_ids);
  const float* pairs = float_matrix("rotations", rotations, tokens, decoder.sizes().head_dim);
  float* out = float_matrix("hidden", hidden, tokens, decoder.sizes().hidden);
  const nb::gil_scoped_release release;
  decoder.forward(plan, pages, static_cast<const int64_t*>(token_ids.data()), pairs, out, max_threads());
}

void logits(QuantizedDecoder& decoder, const Array& hidden, const Array& out) {
  const int64_t rows = hidden.ndim() ? static_cast<int64_t>(hidden.shape(0)) : 0;
  const float* from = float_matrix("hidden", hidden, rows, decoder.sizes().hidden);
  float* to = float_matrix("out", out, rows, decoder.vocabulary());
  const nb::gil_scoped_release release;
  decoder.logits(from, rows, to, max_threads());
}

}  // namespace

void bind_decoder(nb::module_& m) {
  nb::class_<QuantizedDecoder>(m, "QuantizedDecoder", "A decoder of the Llama family over quantised weights.")
      .def("__init__",
           [](QuantizedDecoder* self, int64_t hidden, int64_t intermediate, int64_t heads, int64_t kv_heads,
              int64_t head_dim, float rms_eps, Shared embedding, Shared head, const Array& final_norm) {
             new (self) QuantizedDecoder({hidden, intermediate, heads, kv_heads, head_dim, rms_eps},
                                         std::move(embedding), std::move(head), floats("final_norm", final_norm));
           },
           "hidden"_a, "intermediate"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "rms_eps"_a, "embedding"_a, "head"_a,
           "final_norm"_a.noconvert())
      .def("add_layer",
           [](QuantizedDecoder& decoder, const Array& attention_norm, Shared qkv, const Array& head_norm, Shared output,
              const Array& mlp_norm, Shared gate_up, Shared down) {
             decoder.add_layer({floats("attention_norm", attention_norm), std::move(qkv),
                                floats("head_norm", head_norm), std::move(output), floats("mlp_norm", mlp_norm),
                                std::move(gate_up), std::move(down)});
           },
           "attention_norm"_a.noconvert(), "qkv"_a, "head_norm"_a.noconvert(), "output"_a, "mlp_norm"_a.noconvert(),
           "gate_up"_a, "down"_a,
           "Append a layer; see decoder.h for the shapes and the order of rows. head_norm may be empty.")
      .def("forward", &forward, "plan"_a, "pages"_a, "token_ids"_a.noconvert(), "rotations"_a.noconvert(),
           "hidden"_a.noconvert(), "Run a step's tokens through all layers; hidden is set.")
      .def("logits", &logits, "hidden"_a.noconvert(), "out"_a.noconvert(), "Next-token logits of rows of hidden.");
}

}  // namespace pagetrie
