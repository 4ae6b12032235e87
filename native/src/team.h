// Threads that go through phases together inside one parallel region, where a region per phase would cost too much.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "threads.h"

namespace pagetrie {

// Shared by the threads of a region.
struct Phases {
  std::atomic<int64_t> next[4] = {};
};

// One thread's view. Every thread must call the same methods in the same order.
class Team {
 public:
  Team(Phases& phases, int thread, int threads) : phases_(phases), thread_(thread), threads_(threads) {}

  int thread() const { return thread_; }
  int threads() const { return threads_; }

  // Calls body(first, last) for pieces of [0, count), multiples of `unit` long, handed out to whoever is free, and
  // returns when all are done. Who gets which varies, so results must not depend on it.
  template <typename Body>
  void share(int64_t count, int64_t unit, const Body& body) {
    std::atomic<int64_t>& next = phases_.next[phase_ % 4];
    // A counter is used again four phases on; two barriers lie between its last use, this reset and its next use.
    if (thread_ == 0) phases_.next[(phase_ + 2) % 4].store(0, std::memory_order_relaxed);
    phase_++;
    const int64_t pieces = threads_ == 1 ? 1 : threads_ * 6;
    const int64_t step = std::max(unit, (count + pieces * unit - 1) / (pieces * unit) * unit);
    for (int64_t first; (first = next.fetch_add(step, std::memory_order_relaxed)) < count;)
      body(first, std::min(first + step, count));
    if (threads_ > 1) {
#pragma omp barrier
    }
  }

 private:
  Phases& phases_;
  int thread_, threads_;
  int phase_ = 0;
};

// Calls body(team) on `threads` threads.
template <typename Body>
void together(int threads, const Body& body) {
  Phases phases;
  if (threads <= 1) {
    Team team(phases, 0, 1);
    body(team);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    Team team(phases, omp_get_thread_num(), omp_get_num_threads());
    body(team);
  }
}

}  // namespace pagetrie
