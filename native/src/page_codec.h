// Pages of keys and values in fewer bytes, for memory that keeps pages and doesn't compute on them.
//
// A page [n_layers, 2, n_kv_heads, head_dim * page_size] of fp16 or fp32 (see kv_pages.h) becomes, head by head in the
// same order, integer codes followed by their scales (bfloat16, little-endian):
//   keys:             int8 [head_dim, page_size], then a scale per token;
//   values of 8 bits: int8 [page_size, head_dim], then a scale per token;
//   values of 4 bits: [page_size, groups, 16 bytes], then a scale per token and group of 32 values. Byte j of a group
//                     holds value j in its low and value 16 + j in its high half; groups are filled up with zeros.
// So every token's codes and scales lie in its own page, and no page depends on another.
//
// scale = bfloat16(max|x| / 127), but at least 2^-22; code = nearest integer to x / scale, ties to even; decoded, a value
// is scale * code rounded to the page's type (at most its largest number). With 4 bits the scale has the sign of the value that is
// largest in magnitude (positive if both signs are), so that this one becomes 127, and the code is then replaced by
// the nearest of 16 levels (the lower of two that are as near).
//
// What was decoded encodes to the same bytes again, so that a page which moves to and fro doesn't drift. Since a
// scale has 8 significant bits, it is within 2^-8 of max|x| / 127, so the largest value's code is 127, and the same
// scale is found again from 127 * scale, also rounded to fp16. The least scale keeps codes apart on fp16's coarse
// grid near zero.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention_kernels.h"
#include "cpu.h"

namespace pagetrie {

constexpr int kCodecGroup = 32;

// Where the 16 levels lie: the nearest integers to what minimises the squared error of normally distributed values in
// groups of 32, each divided by the largest in magnitude, sign included (Lloyd's algorithm, with 127 and 0 held).
constexpr int8_t kLevels[16] = {-111, -88, -69, -53, -39, -25, -13, 0, 12, 24, 36, 49, 64, 81, 101, 127};

// A run of vectors to encode or decode: the keys or values of one head.
struct CodecShape {
  KvType type;
  int head_dim;
  int page_size;

  int groups() const { return (head_dim + kCodecGroup - 1) / kCodecGroup; }
  size_t head_bytes() const { return static_cast<size_t>(head_dim) * page_size * (type == KvType::fp16 ? 2 : 4); }
  size_t bytes8() const { return static_cast<size_t>(head_dim + 2) * page_size; }
  size_t bytes4() const { return static_cast<size_t>(groups()) * (kCodecGroup / 2 + 2) * page_size; }
};

// Encoding returns false, what it wrote being of no use, if a value is not a number, infinite or beyond 2^120.
struct CodecKernels {
  bool (*encode_keys)(const CodecShape& shape, const char* from, char* to);
  bool (*encode_values8)(const CodecShape& shape, const char* from, char* to);
  bool (*encode_values4)(const CodecShape& shape, const char* from, char* to);
  void (*decode_keys)(const CodecShape& shape, const char* from, char* to);
  void (*decode_values8)(const CodecShape& shape, const char* from, char* to);
  void (*decode_values4)(const CodecShape& shape, const char* from, char* to);
};

const CodecKernels& codec_kernels_portable();
#if defined(__x86_64__)
const CodecKernels& codec_kernels_avx2();
#endif

// Those of the instruction set in use.
inline const CodecKernels& codec_kernels() {
#if defined(__x86_64__)
  if (isa() != Isa::portable) return codec_kernels_avx2();
#endif
  return codec_kernels_portable();
}

// A codec for whole pages.
struct PageCodec {
  CodecShape shape;
  int n_layers;
  int n_kv_heads;
  int value_bits;  // 8 or 4

  size_t value_bytes() const { return value_bits == 8 ? shape.bytes8() : shape.bytes4(); }
  size_t page_bytes() const { return shape.head_bytes() * 2 * n_layers * n_kv_heads; }
  size_t encoded_bytes() const { return (shape.bytes8() + value_bytes()) * n_layers * n_kv_heads; }

  bool encode(const char* from, char* to) const;
  void decode(const char* from, char* to) const;
};

}  // namespace pagetrie
