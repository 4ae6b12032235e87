#include "cpu.h"

#include <atomic>

namespace pagetrie {

Isa best_isa() {
#if defined(__x86_64__)
  static const Isa best = [] {
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")))
      return Isa::portable;
#if defined(PAGETRIE_EMULATE_AVX512)
    return Isa::avx512;
#endif
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
      return Isa::avx512;
    return Isa::avx2;
  }();
  return best;
#else
  return Isa::portable;
#endif
}

static std::atomic<Isa>& chosen() {
  static std::atomic<Isa> value{best_isa()};
  return value;
}

Isa isa() { return chosen().load(std::memory_order_relaxed); }

void set_isa(Isa isa) { chosen().store(isa, std::memory_order_relaxed); }

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    default: return "portable";
  }
}

}  // namespace pagetrie
