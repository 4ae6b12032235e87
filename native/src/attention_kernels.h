// The arithmetic of attention over pages, once per instruction set.
//
// A tile is 16 keys at positions 16 t .. 16 t + 15. A row is one query of one head. For each row the arithmetic is
// fixed: its tiles in ascending order, in each the scores by fused multiply-adds in the order of the head's dimensions,
// then one step of the online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022). So a row's
// result does not depend on which rows are computed beside it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu.h"

namespace pagetrie {

constexpr int kTile = 16;

enum class KvType { fp16, fp32 };

// Rows and their running state. Rows lie `stride` floats apart in q and mixed; stride is head_dim rounded up to 16, and
// what lies beyond head_dim is zero.
struct Rows {
  int count;
  int head_dim;
  int stride;
  const float* q;         // scaled by 1/sqrt(head_dim) * log2(e), so that the softmax works with powers of two
  const int32_t* low;     // first and last position in reach
  const int32_t* high;
  float* mixed;           // sum of p * value, p = 2^(score - reference)
  float* sums;            // [count, 16] sums of p, by lane
  float* reference;       // at most 8 below the highest score so far; -infinity before the first key
};

// One head's keys and values in one layer, as a page table shows them.
//
// In a page the keys lie as [head_dim, page_size], the values as [page_size, head_dim].
struct TableView {
  const char* keys;       // of page 0
  const char* values;
  size_t page_stride;     // bytes
  const int32_t* pages;
  int page_size;
  int end;                // positions from here on hold no data, but anything, NaN included
};

// Memory for one thread: the tile at hand as fp32, and the bounds of row blocks.
struct TileScratch {
  float* keys;            // [head_dim, 16]
  float* values;          // [16, stride]; zero beyond head_dim
  uint16_t* raw;          // [head_dim, 16] as stored (32 bits each for fp32)
  int32_t* bounds;        // [count, 4]
};

struct AttentionKernels {
  // Attends from all rows to tiles first .. last - 1, updating their state. Returns how many tiles were read.
  int (*attend)(KvType type, const Rows& rows, const TableView& view, int first, int last, const TileScratch& scratch);

  // q[row] = factor * from[row], `stride` floats apart; from's rows lie where `rows` says.
  void (*pack)(const float* const* from, int count, int head_dim, int stride, float factor, float* q);

  // Sets the state to "no key seen".
  void (*clear)(const Rows& rows);

  // Reduces `sums` to one number per row, in sums[row * 16].
  void (*close)(const Rows& rows);

  // Adds a later part's closed result (mixed, sum, reference) to a row's.
  void (*merge)(int stride, float* mixed, float* sum, float* reference, const float* part_mixed, float part_sum,
                float part_reference);

  // to = mixed / sum.
  void (*finish)(int head_dim, const float* mixed, float sum, float* to);

  // Rotates n pairs (x, y) in place, as complex numbers, by pairs (cos, sin).
  void (*rotate)(float* head, const float* rotation, int head_dim);

  // Stores n tokens' values of one head as a page holds them; the rows lie `from_stride` floats apart.
  // Keys go to slots `slot ..` of [head_dim, page_size], values to [page_size, head_dim].
  void (*store_keys)(KvType type, const float* from, size_t from_stride, int n, int head_dim, int page_size, int slot,
                     char* to);
  void (*store_values)(KvType type, const float* from, size_t from_stride, int n, int head_dim, int slot, char* to);

  // Multiplies and adds in registers alone, 2 * 16 * 12 operations per turn: the rate that nothing can pass.
  float (*peak)(long turns);
};

const AttentionKernels& attention_kernels_portable();
#if defined(__x86_64__)
const AttentionKernels& attention_kernels_avx2();
const AttentionKernels& attention_kernels_avx512();
#endif

// Those of the instruction set in use.
inline const AttentionKernels& attention_kernels() {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return attention_kernels_avx512();
  if (isa() == Isa::avx2) return attention_kernels_avx2();
#endif
  return attention_kernels_portable();
}

}  // namespace pagetrie
