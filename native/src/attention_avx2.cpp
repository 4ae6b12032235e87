#include "simd_avx2.h"
#include "attention_kernels.inl"

namespace pagetrie {

const AttentionKernels& attention_kernels_avx2() { return kKernels; }

}  // namespace pagetrie
