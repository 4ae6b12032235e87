// Where keys and values live: pages of fixed size in one block of memory that belongs to someone else.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "attention_kernels.h"

namespace pagetrie {

constexpr int kMaxHeadDim = 256;

// Memory that grows and is kept from call to call; contents are not kept when it grows.
class Buffer {
 public:
  template <typename T>
  T* get(size_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (bytes > bytes_) {
      memory_.reset(static_cast<char*>(::operator new(bytes, std::align_val_t(64))));
      bytes_ = bytes;
    }
    return reinterpret_cast<T*>(memory_.get());
  }

 private:
  struct Delete {
    void operator()(char* memory) const { ::operator delete(memory, std::align_val_t(64)); }
  };
  std::unique_ptr<char, Delete> memory_;
  size_t bytes_ = 0;
};

// The pages, laid out as [num_pages, n_layers, 2, n_kv_heads, head_dim * page_size]: first keys, as
// [head_dim, page_size] per head, then values, as [page_size, head_dim] per head.
class KvPages {
 public:
  KvPages(void* data, KvType type, int num_pages, int n_layers, int n_kv_heads, int head_dim, int page_size)
      : type(type), num_pages(num_pages), n_layers(n_layers), n_kv_heads(n_kv_heads), head_dim(head_dim),
        page_size(page_size), head_bytes(static_cast<size_t>(head_dim) * page_size * (type == KvType::fp16 ? 2 : 4)),
        page_bytes(head_bytes * 2 * n_layers * n_kv_heads), data_(static_cast<char*>(data)) {}

  char* keys(int layer, int head) const { return data_ + (static_cast<size_t>(layer) * 2 * n_kv_heads + head) * head_bytes; }
  char* values(int layer, int head) const { return keys(layer, head) + n_kv_heads * head_bytes; }

  const KvType type;
  const int num_pages, n_layers, n_kv_heads, head_dim, page_size;
  const size_t head_bytes, page_bytes;

  // Bytes of keys and values that attention has read, in whole tiles, while `counting` is on.
  bool counting = false;
  std::atomic<uint64_t> bytes_read{0};

  // Working memory of attention, used by one call at a time.
  std::mutex lock;
  Buffer partials;
  std::vector<Buffer> scratch;

 private:
  char* data_;
};

}  // namespace pagetrie
