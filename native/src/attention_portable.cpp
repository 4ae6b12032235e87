#include "simd_portable.h"
#include "attention_kernels.inl"

namespace pagetrie {

const AttentionKernels& attention_kernels_portable() { return kKernels; }

}  // namespace pagetrie
