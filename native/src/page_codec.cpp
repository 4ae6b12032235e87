// Whole pages, head by head: see page_codec.h.
#include "page_codec.h"

namespace pagetrie {

bool PageCodec::encode(const char* from, char* to) const {
  const CodecKernels& kernels = codec_kernels();
  const auto values = value_bits == 8 ? kernels.encode_values8 : kernels.encode_values4;
  for (int layer = 0; layer < n_layers; layer++) {
    for (int head = 0; head < n_kv_heads; head++, from += shape.head_bytes(), to += shape.bytes8())
      if (!kernels.encode_keys(shape, from, to)) return false;
    for (int head = 0; head < n_kv_heads; head++, from += shape.head_bytes(), to += value_bytes())
      if (!values(shape, from, to)) return false;
  }
  return true;
}

void PageCodec::decode(const char* from, char* to) const {
  const CodecKernels& kernels = codec_kernels();
  const auto values = value_bits == 8 ? kernels.decode_values8 : kernels.decode_values4;
  for (int layer = 0; layer < n_layers; layer++) {
    for (int head = 0; head < n_kv_heads; head++, from += shape.bytes8(), to += shape.head_bytes())
      kernels.decode_keys(shape, from, to);
    for (int head = 0; head < n_kv_heads; head++, from += value_bytes(), to += shape.head_bytes())
      values(shape, from, to);
  }
}

}  // namespace pagetrie
