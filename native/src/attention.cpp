// The work of an attention plan, on the pool of threads: see attention.h.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "threads.h"

namespace pagetrie {

namespace {

constexpr float kLog2E = 1.44269504088896340736f;

int padded(int head_dim) { return (head_dim + 15) / 16 * 16; }

// Partial results of tree items, by (kv head, slot, query head of the group).
struct Partials {
  float* mixed;
  float* sums;
  float* reference;
};

}  // namespace

// One thread's working memory, cut from its buffer.
struct AttentionPlan::Thread {
  Thread(Buffer& buffer, int rows, int head_dim) {
    const size_t stride = padded(head_dim), n = static_cast<size_t>(rows), round = 16;
    const auto up = [&](size_t floats) { return (floats + round - 1) / round * round; };
    const size_t sizes[] = {up(16 * static_cast<size_t>(head_dim)), 16 * stride, up(16 * static_cast<size_t>(head_dim)),
                            n * stride, n * stride, n * stride, n * 16, n * 16, up(n), up(n), up(n), up(n), up(4 * n)};
    size_t total = 0;
    for (size_t size : sizes) total += size;
    float* at = buffer.get<float>(total + up(2 * n));
    float* cut[13];
    for (int i = 0; i < 13; i++) {
      cut[i] = at;
      at += sizes[i];
    }
    tile = {cut[0], cut[1], reinterpret_cast<uint16_t*>(cut[2]), reinterpret_cast<int32_t*>(cut[12])};
    q = cut[3];
    mixed = cut[4];
    total_mixed = cut[5];
    sums = cut[6];
    total_sums = cut[7];
    reference = cut[8];
    total_reference = cut[9];
    low = reinterpret_cast<int32_t*>(cut[10]);
    high = reinterpret_cast<int32_t*>(cut[11]);
    from = reinterpret_cast<const float**>(at);
  }

  TileScratch tile;
  float *q, *mixed, *total_mixed, *sums, *total_sums, *reference, *total_reference;
  int32_t *low, *high;
  const float** from;
  Partials partials;
};

static TableView view_of(const KvPages& pages, int layer, int head, const SequenceShare& s, int end) {
  return {pages.keys(layer, head), pages.values(layer, head), pages.page_bytes, s.pages, pages.page_size, end};
}

static void count_tiles(KvPages& pages, int tiles) {
  if (!pages.counting) return;
  const uint64_t tile_bytes = 2 * kTile * pages.head_bytes / pages.page_size;
  pages.bytes_read.fetch_add(tiles * tile_bytes, std::memory_order_relaxed);
}

void AttentionPlan::check(const KvPages& pages, int layer) const {
  const auto fail = [](const std::string& message) { throw std::invalid_argument(message); };
  if (layer < 0 || layer >= pages.n_layers)
    fail("layer must be between 0 and " + std::to_string(pages.n_layers - 1) + ", got " + std::to_string(layer));
  if (page_size_ != pages.page_size || n_kv_heads_ != pages.n_kv_heads)
    fail("the plan is for pages of " + std::to_string(page_size_) + " tokens and " + std::to_string(n_kv_heads_) +
         " kv heads, got " + std::to_string(pages.page_size) + " and " + std::to_string(pages.n_kv_heads));
  if (max_page_ >= pages.num_pages)
    fail("there are " + std::to_string(pages.num_pages) + " pages, the plan uses page " + std::to_string(max_page_));
}

void AttentionPlan::attend(KvPages& pages, int layer, const float* q, size_t q_stride, float* out, size_t out_stride,
                           float scale, int threads) const {
  check(pages, layer);
  if (work_.empty()) return;
  threads = static_cast<int>(std::min<size_t>(std::max(threads, 1), work_.size()));
  const std::lock_guard<std::mutex> guard(pages.lock);
  const size_t stride = padded(pages.head_dim), slots = static_cast<size_t>(slots_total_) * n_heads_;
  float* memory = pages.partials.get<float>(slots * (stride + 17));
  const Partials partials{memory, memory + slots * stride, memory + slots * (stride + 16)};
  if (pages.scratch.size() < static_cast<size_t>(threads)) pages.scratch.resize(threads);
  std::vector<Thread> each;
  each.reserve(threads);
  for (int i = 0; i < threads; i++) {
    each.emplace_back(pages.scratch[i], max_rows_, pages.head_dim);
    each.back().partials = partials;
  }

  const float factor = scale * kLog2E;
  parallel_items(threads, work_.size(), [&](int thread, size_t i) {
    const Work& work = work_[i];
    const int rows = work.item - static_cast<int>(tree_.size());
    if (rows < 0)
      run_tree(tree_[work.item], work.head, pages, layer, q, q_stride, out, out_stride, factor, each[thread]);
    else
      run_rows(rows_[rows], work.head, pages, layer, q, q_stride, out, out_stride, factor, each[thread]);
  });
  if (merges_.empty()) return;
  const size_t merges = merges_.size() * n_kv_heads_;
  parallel_items(merges < 8 ? 1 : threads, merges, [&](int, size_t i) {
    run_merge(merges_[i / n_kv_heads_], static_cast<int>(i % n_kv_heads_), pages, out, out_stride);
  });
}

// Fills in the rows of `count` tokens of a sequence from token `first` on; returns how many rows.
static int fill_rows(const SequenceShare& s, int first, int count, int group, int head, int window, int head_dim,
                     const float* q, size_t q_stride, const float** from, int32_t* low, int32_t* high) {
  int row = 0;
  for (int i = first; i < first + count; i++) {
    const int position = s.start + i;
    const float* heads = q + (s.first_token + i) * q_stride + static_cast<size_t>(head) * group * head_dim;
    for (int r = 0; r < group; r++, row++) {
      from[row] = heads + static_cast<size_t>(r) * head_dim;
      low[row] = window ? std::max(0, position - window + 1) : 0;
      high[row] = position;
    }
  }
  return row;
}

void AttentionPlan::run_tree(const TreeItem& item, int head, KvPages& pages, int layer, const float* q, size_t q_stride,
                             float* out, size_t out_stride, float factor, const Thread& thread) const {
  const AttentionKernels& kernels = attention_kernels();
  const int head_dim = pages.head_dim, stride = padded(head_dim);
  for (int i = item.first_member, row = 0; i < item.first_member + item.members; i++) {
    const SequenceShare& s = sequences_[members_[i]];
    row += fill_rows(s, 0, s.count, group_, head, window_, head_dim, q, q_stride, thread.from + row, thread.low + row,
                     thread.high + row);
  }
  kernels.pack(thread.from, item.rows, head_dim, stride, factor, thread.q);
  const size_t slot = (static_cast<size_t>(head) * slots_total_ + item.slot) * group_;
  const Rows all{item.rows, head_dim, stride, thread.q, thread.low, thread.high, thread.partials.mixed + slot * stride,
                 thread.partials.sums + slot * 16, thread.partials.reference + slot};
  kernels.clear(all);
  int tiles = 0;
  for (int n = item.first_node; n < item.first_node + item.nodes; n++) {
    const Node& node = nodes_[n];
    const size_t row = static_cast<size_t>(node.row);
    const Rows rows{node.rows, head_dim, stride, all.q + row * stride, all.low + row, all.high + row,
                    all.mixed + row * stride, all.sums + row * 16, all.reference + row};
    const SequenceShare& leader = sequences_[members_[node.first_member]];
    tiles += kernels.attend(pages.type, rows, view_of(pages, layer, head, leader, node.end), node.first_tile,
                            node.last_tile, thread.tile);
  }
  count_tiles(pages, tiles);
  kernels.close(all);
  for (int i = item.first_member, row = 0; i < item.first_member + item.members; i++) {
    const SequenceShare& s = sequences_[members_[i]];
    if (parts_[members_[i]] == 1) {
      for (int r = 0; r < s.count * group_; r++)
        kernels.finish(head_dim, all.mixed + static_cast<size_t>(row + r) * stride, all.sums[(row + r) * 16],
                       out_row(s, r, head, out, out_stride, head_dim));
    }
    row += s.count * group_;
  }
}

void AttentionPlan::run_rows(const RowItem& item, int head, KvPages& pages, int layer, const float* q, size_t q_stride,
                             float* out, size_t out_stride, float factor, const Thread& thread) const {
  const AttentionKernels& kernels = attention_kernels();
  const SequenceShare& s = sequences_[item.sequence];
  const int head_dim = pages.head_dim, stride = padded(head_dim);
  const int count = fill_rows(s, item.first, item.count, group_, head, window_, head_dim, q, q_stride, thread.from,
                              thread.low, thread.high);
  kernels.pack(thread.from, count, head_dim, stride, factor, thread.q);
  const TableView view = view_of(pages, layer, head, s, s.start + s.count);
  Rows total{count, head_dim, stride, thread.q, thread.low, thread.high, thread.total_mixed, thread.total_sums,
             thread.total_reference};
  Rows part = total;
  part.mixed = thread.mixed;
  part.sums = thread.sums;
  part.reference = thread.reference;
  const int first_tile = thread.low[0] / kTile, last_tile = thread.high[count - 1] / kTile + 1;
  int tiles = 0;
  bool begun = false;
  for (int tile = first_tile; tile < last_tile;) {
    const int end = std::min((tile * kTile / kSplit + 1) * (kSplit / kTile), last_tile);
    const Rows& rows = begun ? part : total;
    kernels.clear(rows);
    tiles += kernels.attend(pages.type, rows, view, tile, end, thread.tile);
    kernels.close(rows);
    if (begun) {
      for (int r = 0; r < count; r++) {
        const size_t at = static_cast<size_t>(r) * stride;
        if (part.reference[r] == -INFINITY) continue;
        kernels.merge(stride, total.mixed + at, total.sums + r * 16, total.reference + r, part.mixed + at,
                      part.sums[r * 16], part.reference[r]);
      }
    }
    begun = true;
    tile = end;
  }
  count_tiles(pages, tiles);
  for (int r = 0; r < count; r++)
    kernels.finish(head_dim, total.mixed + static_cast<size_t>(r) * stride, total.sums[r * 16],
                   out_row(s, item.first * group_ + r, head, out, out_stride, head_dim));
}

void AttentionPlan::run_merge(const Merge& merge, int head, KvPages& pages, float* out, size_t out_stride) const {
  const AttentionKernels& kernels = attention_kernels();
  const SequenceShare& s = sequences_[merge.sequence];
  const int head_dim = pages.head_dim, stride = padded(head_dim);
  const size_t slots = static_cast<size_t>(slots_total_) * n_heads_;
  float* mixed = pages.partials.get<float>(slots * (stride + 17));
  float* sums = mixed + slots * stride;
  float* reference = sums + slots * 16;
  for (int r = 0; r < s.count * group_; r++) {
    const auto row_of = [&](int i) {
      return (static_cast<size_t>(head) * slots_total_ + slots_[merge.first_slot + i]) * group_ + r;
    };
    // Rows of a chunk may begin in a later split than its first row, as the window slides.
    int first = 0;
    while (reference[row_of(first)] == -INFINITY && first + 1 < merge.slots) first++;
    const size_t to = row_of(first);
    for (int i = first + 1; i < merge.slots; i++) {
      const size_t from = row_of(i);
      if (reference[from] == -INFINITY) continue;
      kernels.merge(stride, mixed + to * stride, sums + to * 16, reference + to, mixed + from * stride, sums[from * 16],
                    reference[from]);
    }
    kernels.finish(head_dim, mixed + to * stride, sums[to * 16], out_row(s, r, head, out, out_stride, head_dim));
  }
}

}  // namespace pagetrie
