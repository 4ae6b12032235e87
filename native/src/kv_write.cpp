// New keys and values into pages, with the rotation that comes before it: see attention.h.
#include "attention.h"
#include "threads.h"

namespace pagetrie {

namespace {

constexpr int kWorthThreads = 16;  // tokens

}  // namespace

void AttentionPlan::store_run(const Write& write, KvPages& pages, int layer, const float* kv, size_t stride) const {
  const AttentionKernels& kernels = attention_kernels();
  const size_t page = write.page * pages.page_bytes;
  for (int head = 0; head < n_kv_heads_; head++) {
    const float* key = kv + static_cast<size_t>(head) * pages.head_dim;
    const float* value = key + static_cast<size_t>(n_kv_heads_) * pages.head_dim;
    kernels.store_keys(pages.type, key, stride, write.count, pages.head_dim, pages.page_size, write.slot,
                       pages.keys(layer, head) + page);
    kernels.store_values(pages.type, value, stride, write.count, pages.head_dim, write.slot,
                         pages.values(layer, head) + page);
  }
}

void AttentionPlan::store(KvPages& pages, int layer, const float* kv, size_t stride, int threads) const {
  check(pages, layer);
  parallel_items(tokens_ < kWorthThreads ? 1 : threads, writes_.size(), [&](int, size_t i) {
    store_run(writes_[i], pages, layer, kv + writes_[i].token * stride, stride);
  });
}

void AttentionPlan::store(KvPages& pages, int layer, float* qkv, size_t stride, const float* rotations,
                          int threads) const {
  check(pages, layer);
  const AttentionKernels& kernels = attention_kernels();
  const size_t head_dim = static_cast<size_t>(pages.head_dim);
  parallel_items(tokens_ < kWorthThreads ? 1 : threads, writes_.size(), [&](int, size_t i) {
    const Write& write = writes_[i];
    float* first = qkv + write.token * stride;
    for (int t = 0; t < write.count; t++)
      for (int head = 0; head < n_heads_ + n_kv_heads_; head++)
        kernels.rotate(first + t * stride + head * head_dim, rotations + (write.token + t) * head_dim, pages.head_dim);
    store_run(write, pages, layer, first + n_heads_ * head_dim, stride);
  });
}

}  // namespace pagetrie
