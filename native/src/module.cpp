// The extension module: each concern adds its own bindings.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "cpu.h"
#include "threads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pagetrie {

void bind_attention(nb::module_& m);
void bind_decoder(nb::module_& m);
void bind_linear(nb::module_& m);
void bind_page_codec(nb::module_& m);

static void bind_cpu(nb::module_& m) {
  m.def("isa", [] { return isa_name(isa()); }, "The instruction set in use: portable, avx2 or avx512.");
  m.def("best_isa", [] { return isa_name(best_isa()); }, "The best instruction set that this machine has.");
  m.def(
      "set_isa",
      [](const std::string& name) {
        if (name == "auto") return set_isa(best_isa());
        for (Isa choice : {Isa::portable, Isa::avx2, Isa::avx512}) {
          if (name != isa_name(choice)) continue;
          if (choice > best_isa())
            throw std::invalid_argument("this machine has no " + name + "; its best is " + isa_name(best_isa()));
          return set_isa(choice);
        }
        throw std::invalid_argument("isa must be portable, avx2, avx512 or auto, got " + name);
      },
      "name"_a, "Choose the instruction set for the whole process; for tests.");
  m.def(
      "set_threads",
      [](int threads) {
        if (threads < 0) throw std::invalid_argument("threads must be at least 0, got " + std::to_string(threads));
        thread_limit().store(threads, std::memory_order_relaxed);
      },
      "threads"_a, "Set the number of threads that kernels use, for the whole process; 0 for OpenMP's default.");
  m.def("threads", &max_threads, "The number of threads that kernels use.");
}

}  // namespace pagetrie

NB_MODULE(_native, m) {
    // A program may end while a model is still referenced; that is no leak worth a page of warnings.
    nb::set_leak_warnings(false);
  m.doc() = "Kernels over pages. Import torch first, so that both use one OpenMP runtime.";
  pagetrie::bind_cpu(m);
  pagetrie::bind_attention(m);
  pagetrie::bind_linear(m);
  pagetrie::bind_decoder(m);
  pagetrie::bind_page_codec(m);
}
