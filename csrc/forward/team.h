// Threads that go through a forward pass together, in phases.
//
//   phase:  each takes shares (its own first, then whichever is next)  ──► all meet ──► next phase
//
// One parallel region holds the whole pass: waking threads once for every operator would cost
// a small model as much as its weights do. Whoever waits looks for some microseconds and then
// sleeps, so that a neighbour on the same cores costs its share and not everything.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <optional>
#include <utility>

#include "places.h"

#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

namespace kvell {

class Team {
 public:
  explicit Team(int size) : size_(size), next_(size) {}

  int size() const { return size_; }

  // Runs `body(share)` for every share in [0, shares), then meets the others.
  template <class Body>
  void each(int self, int64_t shares, Body body) {
    phase([&] {
      for (int64_t share = self; share < shares; share = take()) body(share);
    });
  }

  // Runs `work`, then meets the others. An exception must not leave a thread of the team, and a thread
  // that left would keep the others waiting: so the first one is kept for `rethrow`, and all threads
  // go on from barrier to barrier with nothing to do.
  template <class Work>
  void phase(Work work) {
    if (!has_failed()) try {
        work();
      } catch (...) {
        fail(std::current_exception());
      }
    barrier();
  }

  bool has_failed() const { return has_failed_.load(std::memory_order_relaxed); }

  // After the last phase, when the threads are back.
  void rethrow() const {
    if (failure_) std::rethrow_exception(failure_);
  }

  int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

  // Returns when all are here; what each wrote before is then seen by all.
  void barrier() {
    const int32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < size_) return wait(phase);
    arrived_.store(0, std::memory_order_relaxed);
    next_.store(size_, std::memory_order_relaxed);
    phase_.store(phase + 1);  // before it asks who sleeps: see sleep
    if (sleepers_.load() > 0) wake();
  }

 private:
  static constexpr int kLooks = 2000;

  void wait(int32_t phase) {
    for (int looks = 0; looks < kLooks; ++looks) {
      if (phase_.load(std::memory_order_acquire) != phase) return;
      pause();
    }
    while (phase_.load() == phase) sleep(phase);
  }

  // Whoever ends the phase either sees this sleeper, or has ended it before the system looks
  // at `phase_` once more, and then nobody sleeps.
  void sleep(int32_t phase) {
#if defined(__linux__)
    sleepers_.fetch_add(1);
    syscall(SYS_futex, &phase_, FUTEX_WAIT_PRIVATE, phase, nullptr, nullptr, 0);
    sleepers_.fetch_sub(1);
#else
    (void)phase;
    std::this_thread::yield();
#endif
  }

  void fail(std::exception_ptr failure) {
    if (!has_failed_.exchange(true)) failure_ = std::move(failure);
  }

  void wake() {
#if defined(__linux__)
    syscall(SYS_futex, &phase_, FUTEX_WAKE_PRIVATE, size_, nullptr, nullptr, 0);
#endif
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  const int size_;
  alignas(64) std::atomic<int64_t> next_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int32_t> phase_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<bool> has_failed_{false};
  std::exception_ptr failure_;
};

// How many threads a pass has; 0 asks for OpenMP's number.
inline int team_threads(int asked) {
#ifdef _OPENMP
  if (omp_in_parallel()) return 1;
  return asked > 0 ? asked : omp_get_max_threads();
#else
  (void)asked;
  return 1;
#endif
}

// Runs `body(team, self)` on `threads` threads, or fewer if there are not so many; throws what a phase
// has thrown.
template <class Body>
void with_team(int threads, Body body) {
#ifdef _OPENMP
  if (threads > 1) {
    std::optional<Team> team;
    const Places places(threads);
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
      team.emplace(omp_get_num_threads());
      places.take(omp_get_thread_num());
      body(*team, omp_get_thread_num());
    }
    return team->rethrow();
  }
#endif
  (void)threads;
  Team alone(1);
  body(alone, 0);
  alone.rethrow();
}

}  // namespace kvell
