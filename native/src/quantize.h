// Matrices of 8 and 4 bits and rows of 8-bit activations, as the kernels read them.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

namespace pagetrie {

// Weights and activations are quantised in groups of 32 along k, one scale per group.
constexpr int kGroup = 32;
// Columns (output features) of a panel: one AVX-512 register of four-byte dot products, or two of AVX2.
constexpr int kPanel = 16;
// The most rows that a multiplication works on at a time.
constexpr int kRowBlock = 64;

// q8: w = d * q, q in [-128, 127].  q4: w = d * q + m, q in [0, 15].  d and m are fp16.
enum class Format { q8, q4 };

// A weight matrix [n, k] in panels of 16 columns. Within a panel, groups follow each other along k:
//   q4: 256 bytes, byte [j][column][t] holds k = 4j + t in its low and k = 16 + 4j + t in its high half (j, t < 4),
//       then d[16], then m[16];
//   q8: 512 bytes, byte [j][column][t] holds k = 4j + t (j < 8), then d[16].
// Columns beyond n and values beyond k are zero.
struct PackedMatrix {
  PackedMatrix(Format format, int64_t n, int64_t k);

  Format format;
  int64_t n;
  int64_t k;
  int64_t groups;
  int64_t panels;
  std::vector<float> bias;  // n padded to whole panels, or empty

  static constexpr int64_t block_bytes(Format format) { return format == Format::q4 ? 320 : 544; }
  int64_t block_bytes() const { return block_bytes(format); }
  int64_t panel_bytes() const { return groups * block_bytes(); }
  int64_t bytes() const { return panels * panel_bytes(); }
  uint8_t* panel(int64_t index) { return data_.get() + index * panel_bytes(); }
  const uint8_t* panel(int64_t index) const { return data_.get() + index * panel_bytes(); }

private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint8_t[], Free> data_;
};

// The block types of a GGUF file that can be packed without loss (ggml-common.h: block_q4_0, block_q4_1, block_q8_0).
enum class BlockType { q4_0, q4_1, q8_0 };

constexpr int64_t bytes_of(BlockType type) {
  return type == BlockType::q4_0 ? 18 : type == BlockType::q4_1 ? 20 : 34;
}

// Pack a float matrix [n, k] as q8: per group d = max|w| / 127, rounded to fp16 but not below what keeps q within 127.
// The error of a weight is at most d / 2. Throws std::invalid_argument for weights that aren't finite or beyond fp16.
PackedMatrix pack_floats(const float* weights, int64_t n, int64_t k);

// Pack a matrix of blocks, [n, k / 32] of them; k must be a multiple of 32. Exact: q4_0 becomes q4 with m = -8 d, which
// throws std::invalid_argument where that is beyond fp16.
PackedMatrix pack_blocks(const uint8_t* blocks, BlockType type, int64_t n, int64_t k);

// Rows of activations: x = scale * q, q in [-127, 127], per group. A group that holds a value that isn't finite has
// q = 0 and a scale that isn't a number, so that the product shows it; a group of values all below 1e-30 counts as zero.
struct QuantizedRows {
  int64_t groups = 0;
  bool wide = false;            // int16 in the order 0 2 1 3 within each four, for AVX2's q8 kernel; else int8
  uint8_t* values = nullptr;    // [rows][groups * 32]
  float* scale = nullptr;       // [rows][groups]
  float* scaled_sum = nullptr;  // [rows][groups]: scale times the sum of q
  int32_t* sum = nullptr;       // [rows][groups]

  int64_t row_bytes() const { return groups * kGroup * (wide ? 2 : 1); }

  static int64_t bytes_needed(int64_t rows, int64_t groups) { return rows * groups * (2 * kGroup + 12) + 256; }
  // Lay the four arrays out in memory of at least bytes_needed, aligned to 64 bytes.
  static QuantizedRows in(uint8_t* memory, int64_t rows, int64_t groups, bool wide);
  QuantizedRows from_row(int64_t row) const;
};

}  // namespace pagetrie
