#include "simd_portable.h"
#include "simd_int.h"
#include "page_codec_kernels.inl"

namespace pagetrie {

const CodecKernels& codec_kernels_portable() { return kKernels; }

}  // namespace pagetrie
