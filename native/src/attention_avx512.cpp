#include "simd_avx512.h"
#include "attention_kernels.inl"

namespace pagetrie {

const AttentionKernels& attention_kernels_avx512() { return kKernels; }

}  // namespace pagetrie
