// The arithmetic of page_codec.h over the operations of a simd_*.h and simd_int.h, which are included before.
#include "page_codec.h"

namespace pagetrie {
namespace {

constexpr int32_t kLargestBits = 0x7b800000;  // 2^120
constexpr uint16_t kLeastScale = 0x3480;      // 2^-22

// The scale, as bfloat16, for values whose largest magnitude has these fp32 bits.
inline uint16_t scale_of(int32_t largest) {
  float value;
  std::memcpy(&value, &largest, 4);
  value /= 127.0f;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t scale = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  return scale > kLeastScale ? scale : kLeastScale;
}

inline float scale_value(uint16_t scale) {
  const uint32_t bits = static_cast<uint32_t>(scale) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint16_t read_scale(const char* scales, int index) {
  uint16_t scale;
  std::memcpy(&scale, scales + 2 * index, 2);
  return scale;
}

inline void write_scale(char* scales, int index, uint16_t scale) { std::memcpy(scales + 2 * index, &scale, 2); }

// Up to 16 values, the rest zero; and up to 16 of a vector's values to where there is room for no more.
template <typename T>
inline V16 load_some(const T* from, int n) {
  if (n >= 16) return load(from);
  T values[16] = {};
  for (int i = 0; i < n; i++) values[i] = from[i];
  return load(values);
}
template <typename T>
inline void store_some(T* to, V16 x, int n) {
  if (n >= 16) return store(to, x);
  T values[16];
  store(values, x);
  for (int i = 0; i < n; i++) to[i] = values[i];
}
inline void store_int8_some(int8_t* to, I16 x, int n) {
  if (n >= 16) return store_int8(to, x);
  int8_t values[16];
  store_int8(values, x);
  for (int i = 0; i < n; i++) to[i] = values[i];
}

// What a code must be above to be nearer to the next level.
constexpr int8_t above(int level) {
  return static_cast<int8_t>((kLevels[level] + kLevels[level + 1] + 256) / 2 - 128);  // rounded down
}

#if defined(__AVX2__)
inline __m256 widen8(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }
inline V16 load_int8(const int8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return {widen8(bytes), widen8(_mm_unpackhi_epi64(bytes, bytes))};
}
inline void store_lanes(int32_t* to, I16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8), x.b);
}
// The numbers of the levels nearest to 32 codes, two to a byte.
inline void pack_levels(I16 a, I16 b, uint8_t* to) {
  const __m256i codes = _mm256_packs_epi16(to_int16(a), to_int16(b));  // in the order 0, 16, 8, 24, by eights
  __m256i numbers = _mm256_setzero_si256();
  for (int level = 0; level < 15; level++)
    numbers = _mm256_sub_epi8(numbers, _mm256_cmpgt_epi8(codes, _mm256_set1_epi8(above(level))));
  numbers = _mm256_permute4x64_epi64(numbers, 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm_or_si128(_mm256_castsi256_si128(numbers), _mm_slli_epi16(_mm256_extracti128_si256(numbers, 1), 4)));
}
inline void unpack_levels(const uint8_t* from, int8_t* to) {
  const __m128i levels = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kLevels)), low = _mm_set1_epi8(15);
  const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(levels, _mm_and_si128(packed, low)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16),
                   _mm_shuffle_epi8(levels, _mm_and_si128(_mm_srli_epi16(packed, 4), low)));
}
#else
inline void pack_levels(I16 a, I16 b, uint8_t* to) {
  for (int i = 0; i < 16; i++) {
    int low = 0, high = 0;
    for (int level = 0; level < 15; level++) {
      low += a.lane[i] > above(level);
      high += b.lane[i] > above(level);
    }
    to[i] = static_cast<uint8_t>(low | high << 4);
  }
}
inline V16 load_int8(const int8_t* from) {
  return each_lane<V16>([&](int i) { return static_cast<float>(from[i]); });
}
inline void store_lanes(int32_t* to, I16 x) { std::memcpy(to, x.lane, sizeof x.lane); }
inline void unpack_levels(const uint8_t* from, int8_t* to) {
  for (int i = 0; i < 16; i++) {
    to[i] = kLevels[from[i] & 15];
    to[16 + i] = kLevels[from[i] >> 4];
  }
}
#endif

inline V16 load_int8_some(const int8_t* from, int n) {
  if (n >= 16) return load_int8(from);
  int8_t values[16] = {};
  for (int i = 0; i < n; i++) values[i] = from[i];
  return load_int8(values);
}

template <typename T>
bool encode_keys_of(const CodecShape& shape, const T* from, int8_t* codes, char* scales) {
  for (int token = 0; token < shape.page_size; token += 16) {
    const int n = shape.page_size - token;
    I16 largest = no_int();
    for (int d = 0; d < shape.head_dim; d++)
      largest = at_least(largest, magnitude_bits(load_some(from + static_cast<size_t>(d) * shape.page_size + token, n)));
    if (max_lane(largest) > kLargestBits) return false;
    int32_t lanes[16];
    store_lanes(lanes, largest);
    float inverse[16];
    for (int i = 0; i < 16; i++) {
      const uint16_t scale = scale_of(lanes[i]);
      inverse[i] = 1.0f / scale_value(scale);
      if (i < n) write_scale(scales, token + i, scale);
    }
    const V16 by = load(inverse);
    for (int d = 0; d < shape.head_dim; d++) {
      const size_t at = static_cast<size_t>(d) * shape.page_size + token;
      store_int8_some(codes + at, nearest(mul(load_some(from + at, n), by)), n);
    }
  }
  return true;
}

template <typename T>
void decode_keys_of(const CodecShape& shape, const int8_t* codes, const char* scales, T* to) {
  for (int token = 0; token < shape.page_size; token += 16) {
    const int n = shape.page_size - token;
    float each[16] = {};
    for (int i = 0; i < 16 && i < n; i++) each[i] = scale_value(read_scale(scales, token + i));
    const V16 by = load(each);
    for (int d = 0; d < shape.head_dim; d++) {
      const size_t at = static_cast<size_t>(d) * shape.page_size + token;
      store_some(to + at, mul(load_int8_some(codes + at, n), by), n);
    }
  }
}

template <typename T>
bool encode_values8_of(const CodecShape& shape, const T* from, int8_t* codes, char* scales) {
  for (int token = 0; token < shape.page_size; token++, from += shape.head_dim, codes += shape.head_dim) {
    I16 magnitudes = no_int();
    for (int d = 0; d < shape.head_dim; d += 16)
      magnitudes = at_least(magnitudes, magnitude_bits(load_some(from + d, shape.head_dim - d)));
    const int32_t largest = max_lane(magnitudes);
    if (largest > kLargestBits) return false;
    const uint16_t scale = scale_of(largest);
    write_scale(scales, token, scale);
    const V16 by = broadcast(1.0f / scale_value(scale));
    for (int d = 0; d < shape.head_dim; d += 16)
      store_int8_some(codes + d, nearest(mul(load_some(from + d, shape.head_dim - d), by)), shape.head_dim - d);
  }
  return true;
}

template <typename T>
void decode_values8_of(const CodecShape& shape, const int8_t* codes, const char* scales, T* to) {
  for (int token = 0; token < shape.page_size; token++, to += shape.head_dim, codes += shape.head_dim) {
    const V16 by = broadcast(scale_value(read_scale(scales, token)));
    for (int d = 0; d < shape.head_dim; d += 16)
      store_some(to + d, mul(load_int8_some(codes + d, shape.head_dim - d), by), shape.head_dim - d);
  }
}

template <typename T>
bool encode_values4_of(const CodecShape& shape, const T* from, uint8_t* packed, char* scales) {
  const int groups = shape.groups();
  for (int group = 0; group < groups * shape.page_size; group++, packed += kCodecGroup / 2) {
    const int first = group % groups * kCodecGroup, left = shape.head_dim - first;
    const T* values = from + static_cast<size_t>(group / groups) * shape.head_dim + first;
    const V16 a = load_some(values, left), b = left > 16 ? load_some(values + 16, left - 16) : zero();
    const int32_t largest = max_lane(at_least(magnitude_bits(a), magnitude_bits(b)));
    if (largest > kLargestBits) return false;
    uint16_t scale = scale_of(largest);
    float highest;
    std::memcpy(&highest, &largest, 4);
    if (scale > kLeastScale && max_lane(at_least(a, b)) < highest) scale |= 0x8000u;
    write_scale(scales, group, scale);
    const V16 by = broadcast(1.0f / scale_value(scale));
    pack_levels(nearest(mul(a, by)), nearest(mul(b, by)), packed);
  }
  return true;
}

template <typename T>
void decode_values4_of(const CodecShape& shape, const uint8_t* packed, const char* scales, T* to) {
  const int groups = shape.groups();
  for (int group = 0; group < groups * shape.page_size; group++, packed += kCodecGroup / 2) {
    const int first = group % groups * kCodecGroup, left = shape.head_dim - first;
    T* values = to + static_cast<size_t>(group / groups) * shape.head_dim + first;
    const V16 by = broadcast(scale_value(read_scale(scales, group)));
    int8_t codes[32];
    unpack_levels(packed, codes);
    store_some(values, mul(load_int8(codes), by), left);
    if (left > 16) store_some(values + 16, mul(load_int8(codes + 16), by), left - 16);
  }
}

// Calls f with a null pointer of the type of the page's values.
template <typename F>
inline auto with_type(KvType type, F f) {
  return type == KvType::fp16 ? f(static_cast<uint16_t*>(nullptr)) : f(static_cast<float*>(nullptr));
}

template <typename T>
inline const T* as(const char* bytes, const T*) { return reinterpret_cast<const T*>(bytes); }
template <typename T>
inline T* as(char* bytes, const T*) { return reinterpret_cast<T*>(bytes); }

inline size_t codes8(const CodecShape& shape) { return static_cast<size_t>(shape.head_dim) * shape.page_size; }
inline size_t codes4(const CodecShape& shape) { return static_cast<size_t>(shape.groups()) * shape.page_size * (kCodecGroup / 2); }

bool encode_keys(const CodecShape& shape, const char* from, char* to) {
  return with_type(shape.type, [&](auto* t) {
    return encode_keys_of(shape, as(from, t), reinterpret_cast<int8_t*>(to), to + codes8(shape));
  });
}
bool encode_values8(const CodecShape& shape, const char* from, char* to) {
  return with_type(shape.type, [&](auto* t) {
    return encode_values8_of(shape, as(from, t), reinterpret_cast<int8_t*>(to), to + codes8(shape));
  });
}
bool encode_values4(const CodecShape& shape, const char* from, char* to) {
  return with_type(shape.type, [&](auto* t) {
    return encode_values4_of(shape, as(from, t), reinterpret_cast<uint8_t*>(to), to + codes4(shape));
  });
}
void decode_keys(const CodecShape& shape, const char* from, char* to) {
  with_type(shape.type, [&](auto* t) {
    decode_keys_of(shape, reinterpret_cast<const int8_t*>(from), from + codes8(shape), as(to, t));
  });
}
void decode_values8(const CodecShape& shape, const char* from, char* to) {
  with_type(shape.type, [&](auto* t) {
    decode_values8_of(shape, reinterpret_cast<const int8_t*>(from), from + codes8(shape), as(to, t));
  });
}
void decode_values4(const CodecShape& shape, const char* from, char* to) {
  with_type(shape.type, [&](auto* t) {
    decode_values4_of(shape, reinterpret_cast<const uint8_t*>(from), from + codes4(shape), as(to, t));
  });
}

constexpr CodecKernels kKernels = {encode_keys, encode_values8, encode_values4,
                                   decode_keys, decode_values8, decode_values4};

}  // namespace
}  // namespace pagetrie
