#include "quantize.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "half.h"
#include "threads.h"

namespace pagetrie {

PackedMatrix::PackedMatrix(Format format_, int64_t n_, int64_t k_)
  : format(format_), n(n_), k(k_), groups((k_ + kGroup - 1) / kGroup), panels((n_ + kPanel - 1) / kPanel) {
  // Huge pages where the system gives them: a one-row product streams through all weights, page walks cost there.
  constexpr size_t huge = size_t{2} << 20;
  const size_t size = static_cast<size_t>(bytes());
  const size_t align = size >= huge ? huge : 64;
  const size_t rounded = (size + align - 1) / align * align;
  data_.reset(static_cast<uint8_t*>(std::aligned_alloc(align, rounded)));
  if (!data_) throw std::bad_alloc();
  if (align == huge) madvise(data_.get(), rounded, MADV_HUGEPAGE);
  std::memset(data_.get(), 0, rounded);
}

QuantizedRows QuantizedRows::in(uint8_t* memory, int64_t rows, int64_t groups, bool wide) {
  QuantizedRows result;
  result.groups = groups;
  result.wide = wide;
  result.values = memory;
  memory += (rows * result.row_bytes() + 63) / 64 * 64;
  result.scale = reinterpret_cast<float*>(memory);
  result.scaled_sum = result.scale + rows * groups;
  result.sum = reinterpret_cast<int32_t*>(result.scaled_sum + rows * groups);
  return result;
}

QuantizedRows QuantizedRows::from_row(int64_t row) const {
  QuantizedRows result = *this;
  result.values += row * row_bytes();
  result.scale += row * groups;
  result.scaled_sum += row * groups;
  result.sum += row * groups;
  return result;
}

namespace {

// The packed place of a row's group: its panel's block and the column in it.
struct Place {
  uint8_t* block;
  int64_t column;
};

Place place_of(PackedMatrix& matrix, int64_t row, int64_t group) {
  return {matrix.panel(row / kPanel) + group * matrix.block_bytes(), row % kPanel};
}

// Whether a group's largest magnitude can be packed; fills in the scale.
bool pack_group(const float* w, int64_t count, Place to) {
  float largest = 0.0f;
  for (int64_t i = 0; i < count; i++) {
    if (!(std::fabs(w[i]) <= 65504.0f)) return false;
    largest = std::max(largest, std::fabs(w[i]));
  }
  uint16_t half = float_to_half(largest / 127.0f);
  if (half_to_float(half) * 127.0f < largest) half++;
  const float scale = half_to_float(half);
  reinterpret_cast<uint16_t*>(to.block + 512)[to.column] = half;
  int8_t* q = reinterpret_cast<int8_t*>(to.block);
  for (int64_t i = 0; i < count && scale > 0.0f; i++)
    q[(i / 4) * 64 + to.column * 4 + i % 4] = static_cast<int8_t>(std::nearbyint(w[i] / scale));
  return true;
}

// Whether the block's scales can be packed.
bool pack_block(const uint8_t* block, BlockType type, Place to) {
  uint16_t* scales = reinterpret_cast<uint16_t*>(to.block + (type == BlockType::q8_0 ? 512 : 256));
  uint16_t d;
  std::memcpy(&d, block, 2);
  scales[to.column] = d;
  if (type == BlockType::q8_0) {
    for (int j = 0; j < 8; j++) std::memcpy(to.block + j * 64 + to.column * 4, block + 2 + 4 * j, 4);
    return (d & 0x7c00u) != 0x7c00u;
  }
  uint16_t m;
  if (type == BlockType::q4_1)
    std::memcpy(&m, block + 2, 2);
  else
    m = float_to_half(-8.0f * half_to_float(d));
  scales[kPanel + to.column] = m;
  const uint8_t* quads = block + (type == BlockType::q4_1 ? 4 : 2);
  for (int j = 0; j < 4; j++) std::memcpy(to.block + j * 64 + to.column * 4, quads + 4 * j, 4);
  return (d & 0x7c00u) != 0x7c00u && (m & 0x7c00u) != 0x7c00u;
}

// Calls pack(row, group) for all, by whole panels on all threads; throws if one gave false.
template <class Pack>
void pack_all(PackedMatrix& matrix, const Pack& pack) {
  std::atomic<int64_t> refused{-1};
  parallel_items(max_threads(), static_cast<size_t>(matrix.panels), [&](int, size_t panel) {
    const int64_t first = static_cast<int64_t>(panel) * kPanel;
    for (int64_t row = first; row < std::min(first + kPanel, matrix.n); row++)
      for (int64_t group = 0; group < matrix.groups; group++)
        if (!pack(row, group)) refused.store(row, std::memory_order_relaxed);
  });
  if (refused >= 0)
    throw std::invalid_argument("row " + std::to_string(refused) +
                  " has weights that aren't finite or are beyond fp16's range (65504)");
}

}  // namespace

PackedMatrix pack_floats(const float* weights, int64_t n, int64_t k) {
  PackedMatrix matrix(Format::q8, n, k);
  pack_all(matrix, [&](int64_t row, int64_t group) {
    const int64_t at = group * kGroup;
    return pack_group(weights + row * k + at, std::min<int64_t>(kGroup, k - at), place_of(matrix, row, group));
  });
  return matrix;
}

PackedMatrix pack_blocks(const uint8_t* blocks, BlockType type, int64_t n, int64_t k) {
  if (k % kGroup)
    throw std::invalid_argument("rows of blocks are whole groups of 32 values, got " + std::to_string(k));
  PackedMatrix matrix(type == BlockType::q8_0 ? Format::q8 : Format::q4, n, k);
  pack_all(matrix, [&](int64_t row, int64_t group) {
    return pack_block(blocks + (row * matrix.groups + group) * bytes_of(type), type, place_of(matrix, row, group));
  });
  return matrix;
}

}  // namespace pagetrie
