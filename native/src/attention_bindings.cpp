// What Python sees of attention over pages.
#include <nanobind/nanobind.h>

#include <atomic>
#include <string>

#include "arrays.h"
#include "attention.h"
#include "bound_pages.h"
#include "threads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pagetrie {

namespace {

AttentionPlan* make_plan(int page_size, const Array& starts, const Array& counts, const Array& tables,
                         const Array& table_offsets, int n_heads, int n_kv_heads, int window) {
  const int32_t* each[] = {int32_vector("starts", starts), int32_vector("counts", counts),
                           int32_vector("tables", tables), int32_vector("table_offsets", table_offsets)};
  const size_t n = starts.shape(0);
  if (counts.shape(0) != n || table_offsets.shape(0) != n + 1)
    throw nb::value_error(("starts, counts and table_offsets must have n, n and n + 1 elements, got " +
                           std::to_string(n) + ", " + std::to_string(counts.shape(0)) + " and " +
                           std::to_string(table_offsets.shape(0))).c_str());
  if (each[3][n] != static_cast<int64_t>(tables.shape(0)))
    throw nb::value_error(("table_offsets must end with the length of tables, " + std::to_string(tables.shape(0)) +
                           ", got " + std::to_string(each[3][n])).c_str());
  const nb::gil_scoped_release release;
  return new AttentionPlan(page_size, n_heads, n_kv_heads, window, each[0], each[1], static_cast<int>(n), each[2],
                           each[3]);
}

void attend(const AttentionPlan& plan, BoundPages& pages, int layer, const Array& q, const Array& out, float scale) {
  const RowsOf from = float_rows("q", q, plan.tokens(), plan.n_heads(), pages.head_dim);
  const RowsOf to = float_rows("out", out, plan.tokens(), plan.n_heads(), pages.head_dim);
  const nb::gil_scoped_release release;
  plan.attend(pages, layer, from.data, from.stride, to.data, to.stride, scale, max_threads());
}

void store(const AttentionPlan& plan, BoundPages& pages, int layer, const Array& kv) {
  const RowsOf rows = float_rows("kv", kv, plan.tokens(), 2 * pages.n_kv_heads, pages.head_dim);
  const nb::gil_scoped_release release;
  plan.store(pages, layer, rows.data, rows.stride, max_threads());
}

void rotate_and_store(const AttentionPlan& plan, BoundPages& pages, int layer, const Array& qkv,
                      const Array& rotations) {
  const int heads = plan.n_heads() + 2 * pages.n_kv_heads;
  const RowsOf rows = float_rows("qkv", qkv, plan.tokens(), heads, pages.head_dim);
  const RowsOf pairs = float_rows("rotations", rotations, plan.tokens(), pages.head_dim / 2, 2);
  if (!contiguous_from(rotations, 0)) refuse("rotations", "contiguous", rotations);
  const nb::gil_scoped_release release;
  plan.store(pages, layer, rows.data, rows.stride, pairs.data, max_threads());
}

double peak(long turns, int threads) {
  const nb::gil_scoped_release release;
  std::atomic<int> numbers{0};  // looked at, so that the loop is not left out
  parallel(threads, [&](int) { numbers += attention_kernels().peak(turns) > 0; });
  return 2.0 * 16 * 12 * turns * threads;
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<BoundPages>(m, "KvPages", "Keys and values in pages, in an array that someone else owns.")
      .def(nb::new_(&BoundPages::make), "data"_a.noconvert(), "page_size"_a)
      .def_rw("counting", &BoundPages::counting, "Whether attention counts what it reads.")
      .def_prop_rw(
          "bytes_read", [](const BoundPages& pages) { return pages.bytes_read.load(); },
          [](BoundPages& pages, uint64_t value) { pages.bytes_read.store(value); },
          "Bytes of keys and values read while counting, in whole tiles of 16 tokens.");
  nb::class_<AttentionPlan>(m, "AttentionPlan", "Who attends to what in a step, worked out once for all layers.")
      .def(nb::new_(&make_plan), "page_size"_a, "starts"_a.noconvert(), "counts"_a.noconvert(), "tables"_a.noconvert(),
           "table_offsets"_a.noconvert(), "n_heads"_a, "n_kv_heads"_a, "window"_a = 0)
      .def_prop_ro("tokens", &AttentionPlan::tokens, "The step's tokens.");
  m.def("attend", &attend, "plan"_a, "pages"_a, "layer"_a, "q"_a.noconvert(), "out"_a.noconvert(), "scale"_a,
        "Attend in one layer from all queries to what the pages hold.");
  m.def("store", &store, "plan"_a, "pages"_a, "layer"_a, "kv"_a.noconvert(),
        "Store the step's keys and values in one layer.");
  m.def("rotate_and_store", &rotate_and_store, "plan"_a, "pages"_a, "layer"_a, "qkv"_a.noconvert(),
        "rotations"_a.noconvert(), "Rotate queries and keys in place, then store the step's keys and values.");
  m.def("peak", &peak, "turns"_a, "threads"_a = 1,
        "Multiply and add in registers alone; returns how many operations. The limit that kernels are measured by.");
}

}  // namespace pagetrie
