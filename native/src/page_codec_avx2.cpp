#include "simd_avx2.h"
#include "simd_int.h"
#include "page_codec_kernels.inl"

namespace pagetrie {

const CodecKernels& codec_kernels_avx2() { return kKernels; }

}  // namespace pagetrie
