// Which instruction set the kernels run with.
#pragma once

namespace pagetrie {

enum class Isa { portable = 0, avx2 = 1, avx512 = 2 };

// The best that this machine has: avx2 needs AVX2, FMA and F16C; avx512 also F, BW, VL, DQ and VNNI,
// unless the build emulates it (native/emulated).
Isa best_isa();

// The one in use: the best, unless set_isa chose another.
Isa isa();

// Chooses for the whole process; meant for tests, and not while kernels run. Must not be better than best_isa().
void set_isa(Isa isa);

const char* isa_name(Isa isa);

}  // namespace pagetrie
