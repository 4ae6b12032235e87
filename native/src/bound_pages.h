// Pages as Python hands them over.
#pragma once

#include <string>

#include "arrays.h"
#include "kv_pages.h"

namespace pagetrie {

// Pages in an array that stays alive as long as they do.
class BoundPages : public KvPages {
 public:
  static BoundPages* make(const Array& data, int page_size) {
    const bool half = data.dtype().code == static_cast<uint8_t>(nanobind::dlpack::dtype_code::Float) && data.dtype().bits == 16;
    if (page_size < 1) throw nanobind::value_error(("page_size must be at least 1, got " + std::to_string(page_size)).c_str());
    if (data.ndim() != 5 || data.shape(2) != 2 || (!half && data.dtype() != nanobind::dtype<float>()) ||
        !contiguous_from(data, 0) || data.size() == 0 || data.shape(4) % page_size)
      refuse("data", "a contiguous float16 or float32 [num_pages, n_layers, 2, n_kv_heads, head_dim * " +
             std::to_string(page_size) + "]", data);
    const size_t head_dim = data.shape(4) / page_size;
    if (head_dim % 2 || head_dim > kMaxHeadDim)
      throw nanobind::value_error(("head_dim must be even and at most " + std::to_string(kMaxHeadDim) + ", got " +
                             std::to_string(head_dim)).c_str());
    return new BoundPages(data, half ? KvType::fp16 : KvType::fp32, static_cast<int>(head_dim), page_size);
  }

 private:
  BoundPages(const Array& data, KvType type, int head_dim, int page_size)
      : KvPages(data.data(), type, static_cast<int>(data.shape(0)), static_cast<int>(data.shape(1)),
                static_cast<int>(data.shape(3)), head_dim, page_size),
        owner_(data) {}

  Array owner_;
};

}  // namespace pagetrie
