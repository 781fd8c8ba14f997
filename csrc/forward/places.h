// A processor for each thread of a team, while it goes through a pass.
//
// Left alone, a thread that wakes may be put beside whoever woke it, and two share one processor
// until the system looks again: after 50 ms without work a pass took four times as long. So a team
// that has as many threads as processors takes one each. Threads that OpenMP keeps stay where they
// are; the caller's own gets back what it had. Whoever told OpenMP of places of its own is obeyed.
#pragma once

#if defined(_OPENMP) && defined(__linux__)
#include <omp.h>
#include <sched.h>

namespace kvell {

class Places {
 public:
  explicit Places(int threads) {
    if (omp_get_proc_bind() != omp_proc_bind_false) return;
    if (sched_getaffinity(0, sizeof(all_), &all_) != 0) return;  // more processors than it has bits for
    has_one_each_ = CPU_COUNT(&all_) == threads;
  }
  ~Places() {
    if (has_one_each_) sched_setaffinity(0, sizeof(all_), &all_);
  }
  Places(const Places&) = delete;
  Places& operator=(const Places&) = delete;

  // For thread `self` of the team; 0 is the caller's own.
  void take(int self) const {
    if (!has_one_each_) return;
    thread_local int taken = -1;
    const int place = nth(self);
    if (self > 0 && taken == place) return;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(place, &one);
    if (sched_setaffinity(0, sizeof(one), &one) == 0) taken = self > 0 ? place : -1;
  }

 private:
  int nth(int index) const {
    int place = 0;
    for (;; ++place)
      if (CPU_ISSET(place, &all_) && index-- == 0) return place;
  }

  cpu_set_t all_;
  bool has_one_each_ = false;
};

}  // namespace kvell
#else
namespace kvell {

struct Places {
  explicit Places(int) {}
  void take(int) const {}
};

}  // namespace kvell
#endif
