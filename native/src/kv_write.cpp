// New keys and values into pages, with the rotation that comes before it: see attention.h.
#include <algorithm>

#include "attention.h"
#include "threads.h"

namespace pagetrie {

void AttentionPlan::store(KvPages& pages, int layer, float* qkv, size_t stride, const float* rotations,
                          int threads) const {
  check(pages, layer);
  const AttentionKernels& kernels = attention_kernels();
  const int head_dim = pages.head_dim;
  constexpr int kWorthThreads = 16;  // tokens
  parallel_items(tokens_ < kWorthThreads ? 1 : threads, writes_.size(), [&](int, size_t i) {
    const Write& write = writes_[i];
    float* first = qkv + write.token * stride;
    if (rotations) {
      for (int t = 0; t < write.count; t++)
        for (int head = 0; head < n_heads_ + n_kv_heads_; head++)
          kernels.rotate(first + t * stride + static_cast<size_t>(head) * head_dim,
                         rotations + static_cast<size_t>(write.token + t) * head_dim, head_dim);
    }
    const size_t page = write.page * pages.page_bytes;
    for (int head = 0; head < n_kv_heads_; head++) {
      const float* key = first + static_cast<size_t>(n_heads_ + head) * head_dim;
      const float* value = key + static_cast<size_t>(n_kv_heads_) * head_dim;
      kernels.store_keys(pages.type, key, stride, write.count, head_dim, pages.page_size, write.slot,
                         pages.keys(layer, head) + page);
      kernels.store_values(pages.type, value, stride, write.count, head_dim, write.slot,
                           pages.values(layer, head) + page);
    }
  });
}

}  // namespace pagetrie
