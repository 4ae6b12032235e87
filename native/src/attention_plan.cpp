// How a step's attention is cut into work: see attention.h.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "attention.h"

namespace pagetrie {

namespace {

constexpr int kFewRows = 48;   // up to so many rows per kv head a sequence joins the trie
constexpr int kRowGroup = 96;  // rows that go through a context together: more read it less often, fewer stay in L1

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

AttentionPlan::AttentionPlan(int page_size, int n_heads, int n_kv_heads, int window, const int32_t* starts,
                             const int32_t* counts, int sequences, const int32_t* tables, const int32_t* table_offsets)
    : page_size_(page_size), n_heads_(n_heads), n_kv_heads_(n_kv_heads), group_(0), window_(window) {
  if (page_size < 1) fail("page_size must be at least 1, got " + std::to_string(page_size));
  if (n_kv_heads < 1 || n_heads < 1 || n_heads % n_kv_heads)
    fail("n_heads must be a multiple of n_kv_heads, got " + std::to_string(n_heads) + " and " + std::to_string(n_kv_heads));
  if (window < 0) fail("window must be at least 0, got " + std::to_string(window));
  group_ = n_heads / n_kv_heads;
  if (table_offsets[0] != 0) fail("table_offsets must begin with 0, got " + std::to_string(table_offsets[0]));
  tables_.assign(tables, tables + table_offsets[sequences]);
  sequences_.reserve(sequences);
  for (int i = 0; i < sequences; i++) {
    const std::string name = "sequence " + std::to_string(i);
    const int start = starts[i], count = counts[i], length = table_offsets[i + 1] - table_offsets[i];
    if (length < 0 || table_offsets[i + 1] > table_offsets[sequences])
      fail("table_offsets must not fall, got " + std::to_string(table_offsets[i + 1]) + " after " + name);
    if (start < 0 || count < 1 || start > (1 << 30) - count)
      fail(name + " must have start >= 0 and count >= 1, got " + std::to_string(start) + " and " + std::to_string(count));
    const SequenceShare s{start, count, tokens_, tables_.data() + table_offsets[i], ceil_div(start + count, page_size)};
    if (length < s.n_pages)
      fail(name + " needs " + std::to_string(s.n_pages) + " pages, its table has " + std::to_string(length));
    for (int page = first_visible(s) / page_size; page < s.n_pages; page++) {
      if (s.pages[page] < 0) fail(name + " has page " + std::to_string(s.pages[page]) + " in its table");
      max_page_ = std::max(max_page_, s.pages[page]);
    }
    for (int done = 0; done < count;) {
      const int at = start + done, slot = at % page_size, n = std::min(page_size - slot, count - done);
      writes_.push_back({tokens_ + done, n, s.pages[at / page_size], slot});
      done += n;
    }
    tokens_ += count;
    (count * group_ <= kFewRows ? few_ : many_).push_back(i);
    sequences_.push_back(s);
  }
  plan_tree();
  plan_rows();
  std::stable_sort(work_.begin(), work_.end(), [](const Work& a, const Work& b) { return a.cost > b.cost; });
}

// Whether two sequences hold a tile in the same pages.
bool AttentionPlan::same_tile(int a, int b, int tile) const {
  const int first = tile * kTile / page_size_, last = (tile * kTile + kTile - 1) / page_size_;
  const SequenceShare &s = sequences_[a], &t = sequences_[b];
  if (last >= s.n_pages || last >= t.n_pages) return false;
  for (int page = first; page <= last; page++)
    if (s.pages[page] != t.pages[page]) return false;
  return true;
}

// Makes nodes of members_[first .. last), which hold the same tiles up to `tile`. At the top, each group that shares
// its first tile becomes an item.
void AttentionPlan::descend(int first, int last, int tile, int split_end, int top) {
  const auto tiles_of = [&](int i) {
    const SequenceShare& s = sequences_[members_[i]];
    return std::min(split_end, ceil_div(s.start + s.count, kTile));
  };
  while (first < last) {
    if (tiles_of(first) <= tile) {
      first++;
      continue;
    }
    const int leader = members_[first];
    int group = first + 1;
    for (int i = group; i < last; i++)
      if (same_tile(leader, members_[i], tile)) std::swap(members_[i], members_[group++]);
    int next = tile + 1;
    if (group == first + 1) {
      next = tiles_of(first);
    } else {
      const auto all_hold = [&](int t) {
        for (int i = first; i < group; i++)
          if (tiles_of(i) <= t || !same_tile(leader, members_[i], t)) return false;
        return true;
      };
      while (next < split_end && all_hold(next)) next++;
    }
    int visible = split_end, end = 0;
    bool more = false;
    for (int i = first; i < group; i++) {
      const SequenceShare& s = sequences_[members_[i]];
      visible = std::min(visible, first_visible(s) / kTile);
      end = std::max(end, s.start + s.count);
      more |= tiles_of(i) > next;
    }
    const int first_node = static_cast<int>(nodes_.size());
    if (std::max(tile, visible) < next)
      nodes_.push_back({first, group - first, 0, 0, std::max(tile, visible), next, end});
    if (more) descend(first, group, next, split_end, 0);
    if (top) {
      tree_.push_back({first, group - first, first_node, static_cast<int>(nodes_.size()) - first_node, slots_total_, 0});
      for (int i = first; i < group; i++) slots_total_ += sequences_[members_[i]].count;
    }
    first = group;
  }
}

void AttentionPlan::plan_tree() {
  int last_split = -1;
  parts_.assign(sequences_.size(), 0);
  for (int i : few_) {
    const SequenceShare& s = sequences_[i];
    const int first = first_visible(s) / kSplit, last = (s.start + s.count - 1) / kSplit;
    parts_[i] = last - first + 1;
    last_split = std::max(last_split, last);
  }
  for (int split = 0; split <= last_split; split++) {
    const int first = static_cast<int>(members_.size());
    for (int i : few_) {
      const SequenceShare& s = sequences_[i];
      if (first_visible(s) < (split + 1) * kSplit && s.start + s.count > split * kSplit) members_.push_back(i);
    }
    descend(first, static_cast<int>(members_.size()), split * (kSplit / kTile), (split + 1) * (kSplit / kTile), 1);
  }

  std::vector<std::vector<int>> slots(sequences_.size());
  std::vector<int> row_of(members_.size() + 1);
  for (size_t item = 0; item < tree_.size(); item++) {
    TreeItem& tree = tree_[item];
    for (int i = tree.first_member, slot = tree.slot; i < tree.first_member + tree.members; i++) {
      const int count = sequences_[members_[i]].count;
      slots[members_[i]].push_back(slot);
      row_of[i] = tree.rows;
      slot += count;
      tree.rows += count * group_;
    }
    double cost = 0;
    for (int n = tree.first_node; n < tree.first_node + tree.nodes; n++) {
      Node& node = nodes_[n];
      const int last = node.first_member + node.members - 1;
      node.row = row_of[node.first_member];
      node.rows = row_of[last] + sequences_[members_[last]].count * group_ - node.row;
      cost += (node.last_tile - node.first_tile) * (node.rows + 4.0);
    }
    max_rows_ = std::max(max_rows_, tree.rows);
    for (int head = 0; head < n_kv_heads_; head++) work_.push_back({cost, static_cast<int>(item), head});
  }
  for (int i : few_) {
    if (parts_[i] < 2) continue;
    merges_.push_back({i, static_cast<int>(slots_.size()), static_cast<int>(slots[i].size())});
    slots_.insert(slots_.end(), slots[i].begin(), slots[i].end());
  }
}

void AttentionPlan::plan_rows() {
  const int tokens = std::max(1, kRowGroup / group_);
  for (int i : many_) {
    const SequenceShare& s = sequences_[i];
    for (int first = 0; first < s.count; first += tokens) {
      const int count = std::min(tokens, s.count - first), end = s.start + first + count;
      const int begin = window_ ? std::max(0, s.start + first - window_ + 1) : 0;
      const int item = static_cast<int>(tree_.size() + rows_.size());
      rows_.push_back({i, first, count});
      max_rows_ = std::max(max_rows_, count * group_);
      const double cost = (ceil_div(end, kTile) - begin / kTile) * (count * group_ + 4.0);
      for (int head = 0; head < n_kv_heads_; head++) work_.push_back({cost, item, head});
    }
  }
}

}  // namespace pagetrie
