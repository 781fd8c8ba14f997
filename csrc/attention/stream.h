// Asks memory for the next span in the order of addresses, a little at a time.
//
// K and V of a page are one run of bytes over all heads; the loads themselves jump between
// heads, which the processor's own prefetchers follow badly (a third of the speed).
#pragma once
#include <cstdint>

#include "task.h"

namespace {

// A prefetch that finds no room among the lines under way is dropped, and the load itself then waits
// for memory. So each line is asked for once more, so many rows before its use: whatever came costs
// a look into the second cache, and whatever was dropped is on its way again.
constexpr int kNearRows = 48;
static_assert(kNearRows < kvell::kSpan, "a head's rows are followed by one span of the next one's");

KVELL_INLINE void fetch_near(const uint8_t* const* row, int64_t at_bytes) {
  __builtin_prefetch(row[kNearRows] + at_bytes, 0, 3);
}

class Stream {
 public:
  void clear() {
    count_ = taken_ = 0;
    at_ = end_ = nullptr;
  }

  // Appends `bytes` from `begin`; runs that touch become one.
  void add(const uint8_t* begin, int64_t bytes) {
    if (count_ > 0 && runs_[count_ - 1].end == begin) {
      runs_[count_ - 1].end = begin + bytes;
    } else if (count_ < kRuns) {
      runs_[count_++] = {begin, begin + bytes};
    }
  }

  // Prefetches the next `lines` cache lines into the second-level cache.
  inline __attribute__((always_inline)) void advance(int lines) {
    if (end_ - at_ < lines * kLineBytes) return advance_over_runs(lines);
    for (int i = 0; i < lines; ++i) __builtin_prefetch(at_ + i * kLineBytes, 0, 2);
    at_ += lines * kLineBytes;
  }

 private:
  static constexpr int kRuns = 64, kLineBytes = 64;
  struct Run {
    const uint8_t *begin, *end;
  };

  __attribute__((noinline)) void advance_over_runs(int lines) {
    for (; lines > 0; --lines) {
      if (at_ >= end_) {
        if (taken_ == count_) return;
        at_ = runs_[taken_].begin;
        end_ = runs_[taken_++].end;
      }
      __builtin_prefetch(at_, 0, 2);
      at_ += kLineBytes;
    }
  }

  Run runs_[kRuns];
  const uint8_t *at_ = nullptr, *end_ = nullptr;  // what is left of the run that is being fetched
  int count_ = 0, taken_ = 0;
};

}  // namespace
