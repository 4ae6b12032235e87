// The kernels of attention_kernels.h, written over the sixteen-lane type of a simd_*.h file that was included before.

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "attention_kernels.h"

#define PAGETRIE_INLINE inline __attribute__((always_inline))

namespace pagetrie {
namespace {

constexpr float kLazy = 8.0f;  // how far (as a power of two) a score may pass the reference before it is renewed

// 2^x for x <= 2^7, relative error below 2e-7; for x < -126 some number of that size. NaN stays.
PAGETRIE_INLINE V16 exp2_lanes(V16 x) {
  x = at_least(broadcast(-126.0f), x);
  const V16 magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const V16 t = add(x, magic);
  const V16 f = sub(x, sub(t, magic));
  V16 p = broadcast(0x1.5bba14p-10f);  // minimax over [-1/2, 1/2] with p(0) = 1
  p = fma(p, f, broadcast(0x1.3cea88p-7f));
  p = fma(p, f, broadcast(0x1.c6b752p-5f));
  p = fma(p, f, broadcast(0x1.ebf9bcp-3f));
  p = fma(p, f, broadcast(0x1.62e42ap-1f));
  p = fma(p, f, broadcast(1.0f));
  return scale_exponent(p, t);
}

PAGETRIE_INLINE float exp2_one(float x) {
  float lanes[16];
  store(lanes, exp2_lanes(broadcast(x)));
  return lanes[0];
}

// Where a later tile lies. It is asked for line by line between multiplications, keys with keys and values with values:
// pages lie anywhere, so the hardware can't guess the next one, and a core has few requests in flight, so a burst would
// stop the loads that are due.
struct Ahead {
  const char* keys;
  const char* values;
  size_t keys_row, values_row;  // bytes
  size_t element;
};

// sums[R][C] += a[R, k] * b[k, 16 C], in the order of k.
template <int R, int C, typename B, typename Each>
PAGETRIE_INLINE void multiply(const float* a, size_t a_stride, const B* b, size_t b_stride, int k, V16 (&sums)[R][C],
                              const Each& each) {
  for (int i = 0; i < k; i++, b += b_stride) {
    each(i);
    V16 right[C];
    for (int c = 0; c < C; c++) right[c] = load(b + 16 * c);
    for (int r = 0; r < R; r++) {
      const V16 left = broadcast(a[r * a_stride + i]);
      for (int c = 0; c < C; c++) sums[r][c] = fma(left, right[c], sums[r][c]);
    }
  }
}

// mixed[R, columns 16 C] += p[R, 16] * values[16, 16 C]
template <int R, int C, typename V, typename Each>
PAGETRIE_INLINE void mix(const float* p, const V* values, size_t values_stride, float* mixed, size_t stride,
                         const Each& each) {
  V16 sums[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) sums[r][c] = load(mixed + r * stride + 16 * c);
  multiply<R, C>(p, kTile, values, values_stride, kTile, sums, each);
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(mixed + r * stride + 16 * c, sums[r][c]);
}

// One tile for R rows from row `first` on. `base` is the tile's first position.
template <int R, typename K, typename V>
void attend_block(const Rows& rows, int first, const K* keys, size_t keys_stride, const V* values, size_t values_stride,
                  int base, bool masked, const Ahead& ahead) {
  const Ahead later = ahead;
  const size_t stride = static_cast<size_t>(rows.stride);
  V16 scores[R][1];
  for (int r = 0; r < R; r++) scores[r][0] = zero();
  const auto next_keys = [later](int i) { prefetch(later.keys + i * later.keys_row); };
  multiply<R, 1>(rows.q + first * stride, stride, keys, keys_stride, rows.head_dim, scores, next_keys);

  alignas(64) float p[R * kTile];
  float* mixed = rows.mixed + first * stride;
  float* sums = rows.sums + first * kTile;
  float* reference = rows.reference + first;
  const int32_t* low = rows.low + first;
  const int32_t* high = rows.high + first;
  if (masked) {
    const V16 never = broadcast(-std::numeric_limits<float>::infinity());
    for (int r = 0; r < R; r++) scores[r][0] = select_range(low[r] - base, high[r] - base, scores[r][0], never);
  }
  for (int r = 0; r < R; r++) {
    if (any_greater(scores[r][0], broadcast(reference[r] + kLazy))) {
      const float renewed = max_lane(scores[r][0]);
      const V16 factor = broadcast(exp2_one(reference[r] - renewed));
      reference[r] = renewed;
      store(sums + r * kTile, mul(load(sums + r * kTile), factor));
      for (size_t i = 0; i < stride; i += 16) store(mixed + r * stride + i, mul(load(mixed + r * stride + i), factor));
    }
    V16 weight = exp2_lanes(sub(scores[r][0], broadcast(reference[r])));
    if (masked) weight = select_range(low[r] - base, high[r] - base, weight, zero());
    store(p + r * kTile, weight);
    store(sums + r * kTile, add(load(sums + r * kTile), weight));
  }

  // Few rows leave registers free for twice the columns, which hides the latency of their sums.
  constexpr int C = 2 * R <= kBlockRows ? 2 : 1;
  size_t i = 0;
  const auto next_values = [&later, &i](int key) {
    prefetch(later.values + key * later.values_row + i * later.element);
  };
  for (; i + 16 * C <= stride; i += 16 * C) mix<R, C>(p, values + i, values_stride, mixed + i, stride, next_values);
  if (C > 1 && i < stride) mix<R, 1>(p, values + i, values_stride, mixed + i, stride, next_values);
}

template <int R, typename K, typename V>
PAGETRIE_INLINE void attend_rows(int n, const Rows& rows, int first, const K* keys, size_t keys_stride, const V* values,
                                 size_t values_stride, int base, bool masked, const Ahead& ahead) {
  if (n == R) return attend_block<R>(rows, first, keys, keys_stride, values, values_stride, base, masked, ahead);
  if constexpr (R > 1) attend_rows<R - 1>(n, rows, first, keys, keys_stride, values, values_stride, base, masked, ahead);
}

// Row blocks of nearly equal size, at most kBlockRows each.
struct Blocks {
  int count, small, large;  // the first `large` blocks hold small + 1 rows, the rest `small`
};

PAGETRIE_INLINE Blocks split_rows(int rows) {
  const int count = (rows + kBlockRows - 1) / kBlockRows;
  return {count, rows / count, rows % count};
}

// The positions that a block's rows reach: all of them lie in outer, all rows reach all of inner.
struct Bounds {
  int32_t outer_low, outer_high, inner_low, inner_high;
};

template <typename T, int N>
PAGETRIE_INLINE void copy_run(const T* from, size_t from_stride, T* to, int head_dim) {
  for (int d = 0; d < head_dim; d++) std::memcpy(to + d * kTile, from + d * from_stride, N * sizeof(T));
}

// Reads a tile into the scratch, whatever the page size: keys of positions at or after view.end become anything finite
// or not (rows mask them), their values zero (a weight of 0 would not keep a NaN out).
template <typename T>
void load_tile(const TableView& view, int head_dim, int stride, int base, const TileScratch& scratch) {
  const int size = view.page_size, valid = view.end - base < kTile ? view.end - base : kTile;
  const bool whole = size % kTile == 0;
  T* raw = reinterpret_cast<T*>(scratch.raw);
  const T* from = raw;
  size_t from_stride = kTile;
  if (whole) {
    from = reinterpret_cast<const T*>(view.keys + view.pages[base / size] * view.page_stride) + base % size;
    from_stride = static_cast<size_t>(size);
  }
  for (int j = 0; j < valid;) {
    const int position = base + j, slot = position % size;
    const size_t page = view.pages[position / size] * view.page_stride;
    const int run = size - slot < valid - j ? size - slot : valid - j;
    if (!whole) {
      const T* keys = reinterpret_cast<const T*>(view.keys + page) + slot;
      const size_t page_size = static_cast<size_t>(size);
      if (run == 8) {
        copy_run<T, 8>(keys, page_size, raw + j, head_dim);
      } else if (run == 4) {
        copy_run<T, 4>(keys, page_size, raw + j, head_dim);
      } else if (run == 2) {
        copy_run<T, 2>(keys, page_size, raw + j, head_dim);
      } else {
        for (int i = 0; i < run; i++) copy_run<T, 1>(keys + i, page_size, raw + j + i, head_dim);
      }
    }
    const T* values = reinterpret_cast<const T*>(view.values + page) + static_cast<size_t>(slot) * head_dim;
    for (int i = 0; i < run; i++, values += head_dim) {
      float* to = scratch.values + (j + i) * stride;
      int d = 0;
      for (; d + 16 <= head_dim; d += 16) store(to + d, load(values + d));
      if (d < head_dim) {
        T some[16] = {};
        std::memcpy(some, values + d, (head_dim - d) * sizeof(T));
        store(to + d, load(some));
      }
    }
    j += run;
  }
  if (valid < kTile) std::memset(scratch.values + valid * stride, 0, (kTile - valid) * stride * sizeof(float));
  for (int d = 0; d < head_dim; d++) store(scratch.keys + d * kTile, load(from + d * from_stride));
}

constexpr int kTilesAhead = 2;

template <typename T>
PAGETRIE_INLINE Ahead ahead_of(const TableView& view, int head_dim, int base) {
  const int slot = base % view.page_size;
  const size_t page = view.pages[base / view.page_size] * view.page_stride;
  const size_t row = static_cast<size_t>(head_dim) * sizeof(T);
  return {view.keys + page + slot * sizeof(T), view.values + page + slot * row, view.page_size * sizeof(T), row,
          sizeof(T)};
}

template <typename T>
int attend_tiles(const Rows& rows, const TableView& view, int first, int last, const TileScratch& scratch) {
  const Blocks blocks = split_rows(rows.count);
  Bounds* bounds = reinterpret_cast<Bounds*>(scratch.bounds);
  int32_t lowest = std::numeric_limits<int32_t>::max(), highest = -1;
  for (int b = 0, row = 0; b < blocks.count; b++) {
    Bounds all{rows.low[row], rows.high[row], rows.low[row], rows.high[row]};
    for (const int end = row + blocks.small + (b < blocks.large); row < end; row++) {
      const int32_t low = rows.low[row], high = rows.high[row];
      if (low < all.outer_low) all.outer_low = low;
      if (low > all.inner_low) all.inner_low = low;
      if (high > all.outer_high) all.outer_high = high;
      if (high < all.inner_high) all.inner_high = high;
    }
    bounds[b] = all;
    if (all.outer_low < lowest) lowest = all.outer_low;
    if (all.outer_high > highest) highest = all.outer_high;
  }
  if (first < lowest / kTile) first = lowest / kTile;
  if (last > highest / kTile + 1) last = highest / kTile + 1;

  const bool aligned = view.page_size % kTile == 0 && rows.head_dim % 16 == 0;
  // Converting while multiplying pays for one block; several share the converted tile.
  const bool direct_type = std::is_same<T, float>::value || blocks.count == 1;
  if (aligned) {
    for (int tile = first; tile < last && tile < first + kTilesAhead; tile++) {
      const Ahead now = ahead_of<T>(view, rows.head_dim, tile * kTile);
      for (int d = 0; d < rows.head_dim; d++) prefetch(now.keys + d * now.keys_row);
      for (size_t i = 0; i < kTile * now.values_row; i += 64) prefetch(now.values + i);
    }
  }
  int read = 0;
  for (int tile = first; tile < last; tile++) {
    const int base = tile * kTile;
    bool loaded = false;
    const bool direct = aligned && direct_type && base + kTile <= view.end;
    // With nothing to ask for, the first line of the scratch will do: it is at hand.
    Ahead ahead{reinterpret_cast<const char*>(scratch.keys), reinterpret_cast<const char*>(scratch.values), 0, 0, 0};
    if (aligned && tile + kTilesAhead < last) ahead = ahead_of<T>(view, rows.head_dim, base + kTilesAhead * kTile);
    for (int b = 0, row = 0; b < blocks.count; b++) {
      const int n = blocks.small + (b < blocks.large), start = row;
      row += n;
      const Bounds& reach = bounds[b];
      if (base + kTile <= reach.outer_low || base > reach.outer_high) continue;
      const bool masked = base < reach.inner_low || base + kTile - 1 > reach.inner_high;
      read += !loaded;
      if (direct) {
        const size_t page = view.pages[base / view.page_size] * view.page_stride;
        const int slot = base % view.page_size;
        const T* keys = reinterpret_cast<const T*>(view.keys + page) + slot;
        const T* values = reinterpret_cast<const T*>(view.values + page) + static_cast<size_t>(slot) * rows.head_dim;
        attend_rows<kBlockRows>(n, rows, start, keys, view.page_size, values, rows.head_dim, base, masked, ahead);
      } else {
        if (!loaded) load_tile<T>(view, rows.head_dim, rows.stride, base, scratch);
        attend_rows<kBlockRows>(n, rows, start, scratch.keys, kTile, scratch.values, rows.stride, base, masked, ahead);
      }
      loaded = true;
    }
  }
  return read;
}

int attend(KvType type, const Rows& rows, const TableView& view, int first, int last, const TileScratch& scratch) {
  return type == KvType::fp16 ? attend_tiles<uint16_t>(rows, view, first, last, scratch)
                              : attend_tiles<float>(rows, view, first, last, scratch);
}

void pack(const float* const* from, int count, int head_dim, int stride, float factor, float* q) {
  const V16 by = broadcast(factor);
  for (int row = 0; row < count; row++, q += stride) {
    int d = 0;
    for (; d + 16 <= head_dim; d += 16) store(q + d, mul(load(from[row] + d), by));
    for (; d < head_dim; d++) q[d] = from[row][d] * factor;
    for (; d < stride; d++) q[d] = 0.0f;
  }
}

void clear(const Rows& rows) {
  std::memset(rows.mixed, 0, static_cast<size_t>(rows.count) * rows.stride * sizeof(float));
  std::memset(rows.sums, 0, static_cast<size_t>(rows.count) * kTile * sizeof(float));
  for (int row = 0; row < rows.count; row++) rows.reference[row] = -std::numeric_limits<float>::infinity();
}

void close(const Rows& rows) {
  for (int row = 0; row < rows.count; row++) rows.sums[row * kTile] = sum_lanes(load(rows.sums + row * kTile));
}

void merge(int stride, float* mixed, float* sum, float* reference, const float* part_mixed, float part_sum,
           float part_reference) {
  const float top = part_reference > *reference ? part_reference : *reference;
  const float keep = exp2_one(*reference - top), take = exp2_one(part_reference - top);
  *sum = *sum * keep + part_sum * take;
  *reference = top;
  const V16 old_share = broadcast(keep), new_share = broadcast(take);
  for (int d = 0; d < stride; d += 16)
    store(mixed + d, fma(load(part_mixed + d), new_share, mul(load(mixed + d), old_share)));
}

void finish(int head_dim, const float* mixed, float sum, float* to) {
  const float share = 1.0f / sum;
  const V16 by = broadcast(share);
  int d = 0;
  for (; d + 16 <= head_dim; d += 16) store(to + d, mul(load(mixed + d), by));
  for (; d < head_dim; d++) to[d] = mixed[d] * share;
}

void rotate(float* head, const float* rotation, int head_dim) {
  int d = 0;
  for (; d + 16 <= head_dim; d += 16) store(head + d, mul_complex(load(head + d), load(rotation + d)));
  if (d < head_dim) {
    float some[16] = {}, by[16] = {};
    std::memcpy(some, head + d, (head_dim - d) * sizeof(float));
    std::memcpy(by, rotation + d, (head_dim - d) * sizeof(float));
    store(some, mul_complex(load(some), load(by)));
    std::memcpy(head + d, some, (head_dim - d) * sizeof(float));
  }
}

template <typename T>
PAGETRIE_INLINE void store_row(const float* from, int head_dim, T* to) {
  int d = 0;
  for (; d + 16 <= head_dim; d += 16) store(to + d, load(from + d));
  if (d < head_dim) {
    float some[16] = {};
    std::memcpy(some, from + d, (head_dim - d) * sizeof(float));
    T narrow[16];
    store(narrow, load(some));
    std::memcpy(to + d, narrow, (head_dim - d) * sizeof(T));
  }
}

template <typename T>
void store_keys_as(const float* from, size_t from_stride, int n, int head_dim, int page_size, int slot, char* page) {
  T* to = reinterpret_cast<T*>(page) + slot;
  constexpr int kGroup = 16, kMost = 256;
  T rows[kGroup][kMost];
  for (int start = 0; start < n; start += kGroup, to += kGroup) {
    const int some = n - start < kGroup ? n - start : kGroup;
    for (int j = 0; j < some; j++) store_row(from + (start + j) * from_stride, head_dim, rows[j]);
    for (int d = 0; d < head_dim; d++)
      for (int j = 0; j < some; j++) to[static_cast<size_t>(d) * page_size + j] = rows[j][d];
  }
}

void store_keys(KvType type, const float* from, size_t from_stride, int n, int head_dim, int page_size, int slot,
                char* to) {
  if (type == KvType::fp16) return store_keys_as<uint16_t>(from, from_stride, n, head_dim, page_size, slot, to);
  store_keys_as<float>(from, from_stride, n, head_dim, page_size, slot, to);
}

template <typename T>
void store_values_as(const float* from, size_t from_stride, int n, int head_dim, int slot, char* page) {
  T* to = reinterpret_cast<T*>(page) + static_cast<size_t>(slot) * head_dim;
  for (int j = 0; j < n; j++) store_row(from + j * from_stride, head_dim, to + static_cast<size_t>(j) * head_dim);
}

void store_values(KvType type, const float* from, size_t from_stride, int n, int head_dim, int slot, char* to) {
  if (type == KvType::fp16) return store_values_as<uint16_t>(from, from_stride, n, head_dim, slot, to);
  store_values_as<float>(from, from_stride, n, head_dim, slot, to);
}

float peak(long turns) {
  // All lanes unequal and read from memory, so that the compiler leaves none out.
  volatile float seed = 1.0f;
  float start[16 * 6];
  for (int i = 0; i < 16 * 6; i++) start[i] = seed + static_cast<float>(i);
  const V16 a = broadcast(0.999f * seed), b = broadcast(0.001f * seed);
  V16 sums[6];
  for (int i = 0; i < 6; i++) sums[i] = load(start + 16 * i);
  for (long i = 0; i < turns; i++)
    for (int twice = 0; twice < 2; twice++)
      for (V16& sum : sums) sum = fma(sum, a, b);
  float total = 0.0f;
  for (const V16& sum : sums) total += sum_lanes(sum);
  return total;
}

constexpr AttentionKernels kKernels{attend, pack, clear, close, merge, finish, rotate, store_keys, store_values,
                                    peak};

}  // namespace
}  // namespace pagetrie
