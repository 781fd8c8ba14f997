// Asks memory for the next span in the order of addresses, a little at a time.
//
// K and V of a page are one run of bytes over all heads; the loads themselves jump between
// heads, which the processor's own prefetchers follow badly (a third of the speed).
#pragma once
#include <cstdint>

#include "task.h"

namespace {

class Stream {
 public:
  void clear() { count_ = next_ = 0; }

  // Appends `bytes` from `begin`; runs that touch become one.
  void add(const uint8_t* begin, int64_t bytes) {
    if (count_ > 0 && runs_[count_ - 1].end == begin) {
      runs_[count_ - 1].end = begin + bytes;
    } else if (count_ < kRuns) {
      runs_[count_++] = {begin, begin + bytes};
    }
  }

  // Prefetches the next `lines` cache lines into the second-level cache.
  void advance(int lines) {
    while (lines > 0 && next_ < count_) {
      Run& run = runs_[next_];
      const int left = static_cast<int>((run.end - run.begin + kLineBytes - 1) / kLineBytes);
      const int now = lines < left ? lines : left;
      for (int i = 0; i < now; ++i) __builtin_prefetch(run.begin + i * kLineBytes, 0, 2);
      run.begin += now * kLineBytes;
      lines -= now;
      if (now == left) ++next_;
    }
  }

 private:
  static constexpr int kRuns = 64, kLineBytes = 64;
  struct Run {
    const uint8_t *begin, *end;
  };
  Run runs_[kRuns];
  int count_ = 0, next_ = 0;
};

}  // namespace
