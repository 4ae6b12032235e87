// Attention of a step over pages: chunks of prompts and single tokens of many sequences, together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kv_pages.h"

namespace pagetrie {

// A context is cut at multiples of this many tokens. The parts are computed on their own and merged in ascending order,
// whoever computes them, so that one long sequence keeps many threads busy and its result doesn't depend on how many.
constexpr int kSplit = 512;

// One sequence's share of a step.
struct SequenceShare {
  int start, count;       // its tokens have positions start .. start + count - 1
  int first_token;        // the step's row of the first
  const int32_t* pages;
  int n_pages;
};

// Who attends to what in a step, worked out once for all layers.
//
// Sequences with few rows are put in a trie of tiles, within each split: what several of them hold is read once for all
// (tree attention). Sequences with many rows (prefill chunks) are cut into groups of rows, each going through its context.
class AttentionPlan {
 public:
  // tables holds the sequences' page tables one after the other, table_offsets [sequences + 1] where each begins.
  // A window of 0 means none. Throws std::invalid_argument.
  AttentionPlan(int page_size, int n_heads, int n_kv_heads, int window, const int32_t* starts, const int32_t* counts,
                int sequences, const int32_t* tables, const int32_t* table_offsets);

  AttentionPlan(const AttentionPlan&) = delete;  // its shares point into it
  AttentionPlan& operator=(const AttentionPlan&) = delete;

  int tokens() const { return tokens_; }
  int n_heads() const { return n_heads_; }

  // Attends in one layer from all queries to what the pages hold, the step's own tokens included.
  //
  // q and out are [tokens, n_heads, head_dim]; tokens lie q_stride and out_stride floats apart.
  // Throws std::invalid_argument if the pages don't fit the plan.
  void attend(KvPages& pages, int layer, const float* q, size_t q_stride, float* out, size_t out_stride, float scale,
              int threads) const;

  // Stores the step's new keys and values in one layer, before attend.
  //
  // kv is [tokens, 2, n_kv_heads, head_dim]: keys, values; tokens lie `stride` floats apart.
  void store(KvPages& pages, int layer, const float* kv, size_t stride, int threads) const;

  // The same, after rotating queries and keys in place, pairs of adjacent elements as complex numbers.
  //
  // qkv is [tokens, n_heads + 2 n_kv_heads, head_dim]: queries, keys, values; rotations [tokens, head_dim / 2] pairs
  // (cos, sin).
  void store(KvPages& pages, int layer, float* qkv, size_t stride, const float* rotations, int threads) const;

 private:
  // Tiles first .. last - 1, as a run of sequences' tables shows them all alike.
  struct Node {
    int first_member, members;  // in members_
    int row, rows;              // within the item
    int first_tile, last_tile;
    int end;                    // one past the last position that any of the members has
  };
  struct TreeItem {
    int first_member, members;
    int first_node, nodes;
    int slot;                   // where its tokens' partial results begin, in tokens
    int rows;                   // per kv head
  };
  struct RowItem {
    int sequence, first, count;  // tokens of the sequence
  };
  struct Work {
    double cost;
    int item;                   // tree items first, then row items
    int head;
  };
  // Tokens of a sequence, whose partial results lie at slots_[first_slot ..].
  struct Merge {
    int sequence, first_slot, slots;
  };
  // Tokens that go to one page.
  struct Write {
    int token, count, page, slot;
  };
  struct Thread;

  int first_visible(const SequenceShare& s) const { return window_ && s.start >= window_ ? s.start - window_ + 1 : 0; }
  bool same_tile(int a, int b, int tile) const;
  void descend(int first, int last, int tile, int split_end, int top);
  void plan_tree();
  void plan_rows();
  void run_tree(const TreeItem& item, int head, KvPages& pages, int layer, const float* q, size_t q_stride, float* out,
                size_t out_stride, float factor, const Thread& thread) const;
  void run_rows(const RowItem& item, int head, KvPages& pages, int layer, const float* q, size_t q_stride, float* out,
                size_t out_stride, float factor, const Thread& thread) const;
  float* out_row(const SequenceShare& s, int row, int head, float* out, size_t out_stride, int head_dim) const {
    return out + static_cast<size_t>(s.first_token + row / group_) * out_stride +
           static_cast<size_t>(head * group_ + row % group_) * head_dim;
  }
  void run_merge(const Merge& merge, int head, KvPages& pages, float* out, size_t out_stride) const;
  void store_run(const Write& write, KvPages& pages, int layer, const float* kv, size_t stride) const;
  void check(const KvPages& pages, int layer) const;

  int page_size_, n_heads_, n_kv_heads_, group_, window_;
  int tokens_ = 0, max_page_ = 0, slots_total_ = 0, max_rows_ = 0;
  std::vector<int32_t> tables_;
  std::vector<SequenceShare> sequences_;
  std::vector<int> few_, many_;       // sequences by how many rows they have
  std::vector<int> members_;          // sequences, item by item
  std::vector<Node> nodes_;
  std::vector<TreeItem> tree_;
  std::vector<RowItem> rows_;
  std::vector<Work> work_;            // largest first
  std::vector<int> parts_;            // [sequences] in how many splits a sequence of few_ has keys in reach
  std::vector<int> slots_;
  std::vector<Merge> merges_;
  std::vector<Write> writes_;
};

}  // namespace pagetrie
