// The one pool of threads that kernels share with torch: OpenMP's.
#pragma once

#include <atomic>
#include <cstddef>
#include <omp.h>

namespace pagetrie {

// How many threads a kernel may use; set_threads sets it for the process, as torch.set_num_threads does.
// 0 stands for what OpenMP gives by default.
inline std::atomic<int>& thread_limit() {
  static std::atomic<int> limit{0};
  return limit;
}

inline int max_threads() {
  const int limit = thread_limit().load(std::memory_order_relaxed);
  return limit > 0 ? limit : omp_get_max_threads();
}

// Calls body(thread) on `threads` threads of the pool, or here if that is one. body must not throw.
template <typename Body>
void parallel(int threads, const Body& body) {
  if (threads <= 1) {
    body(0);
    return;
  }
#pragma omp parallel num_threads(threads)
  body(omp_get_thread_num());
}

// Calls body(thread, item) for every item in [0, count), handed out in order to whichever thread is free.
// Which thread gets an item varies from run to run, so items must not depend on it.
template <typename Body>
void parallel_items(int threads, size_t count, const Body& body) {
  if (static_cast<size_t>(threads) > count) threads = static_cast<int>(count);
  std::atomic<size_t> next{0};
  parallel(threads, [&](int thread) {
    for (size_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(thread, item);
  });
}

}  // namespace pagetrie
