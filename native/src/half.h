// fp16 to and from fp32 without help from the processor.
#pragma once

#include <cstdint>
#include <cstring>

namespace pagetrie {
namespace {

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  uint32_t bits;
  if (magnitude >= 0x7c00u) {  // infinite or NaN
    bits = 0x7f800000u | (magnitude << 13);
  } else if (magnitude >= 0x0400u) {
    bits = (magnitude << 13) + (112u << 23);
  } else {  // subnormal: a multiple of 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    std::memcpy(&bits, &value, 4);
  }
  bits |= sign;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Rounds to nearest even; values beyond fp16's range become the largest it has, NaN stays.
inline uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477fe000u) return static_cast<uint16_t>(sign | 0x7bffu);
  if (magnitude < 0x38800000u) {  // subnormal in fp16: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
    float shifted;
    std::memcpy(&shifted, &magnitude, 4);
    shifted += 0.5f;
    std::memcpy(&bits, &shifted, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

}  // namespace
}  // namespace pagetrie
