// Asks memory for the next span in the order of addresses, a little at a time.
//
// K and V of a page are one run of bytes over all heads; the loads themselves jump between
// heads, which the processor's own prefetchers follow badly (a third of the speed).
#pragma once
#include <cstdint>

#include "task.h"

namespace {

// On AMD's processors a prefetch that finds no room among the lines under way is dropped, and the load
// itself then waits for memory. So each line is asked for three times more: kAgainLines behind the first time, when some
// room has come free, and twice so many rows before its use. Whatever came costs a look into the second
// cache, and whatever was dropped is on its way again.
constexpr int kAgainLines = 28, kNearRows = 48, kNearestRows = 20;
static_assert(kNearRows < kvell::kSpan, "a head's rows are followed by one span of the next one's");

KVELL_INLINE void fetch_near(const uint8_t* const* row, int64_t at_bytes) {
  __builtin_prefetch(row[kNearRows] + at_bytes, 0, 3);
  __builtin_prefetch(row[kNearestRows] + at_bytes, 0, 3);
}

class Stream {
 public:
  void clear() {
    count_ = 0;
    first_ = again_ = {};
    waits_ = kAgainLines;
  }

  // Appends `bytes` from `begin`; runs that touch become one.
  void add(const uint8_t* begin, int64_t bytes) {
    if (count_ > 0 && runs_[count_ - 1].end == begin) {
      runs_[count_ - 1].end = begin + bytes;
    } else if (count_ < kRuns) {
      runs_[count_++] = {begin, begin + bytes};
    }
  }

  // Prefetches the next `lines` cache lines into the second-level cache: enough where a prefetch that
  // finds no room waits for some.
  inline __attribute__((always_inline)) void advance_once(int lines) { fetch(first_, lines); }

  // Prefetches all that is left, where nothing else is under way.
  void fetch_all() { fetch_over_runs(first_, kMostLines); }

  // The same as advance_once, and as many once more.
  inline __attribute__((always_inline)) void advance(int lines) {
    advance_once(lines);
    if (waits_ > 0)
      waits_ -= lines;
    else
      fetch(again_, lines);
  }

 private:
  static constexpr int kRuns = 64, kLineBytes = 64, kMostLines = 1 << 20;
  struct Run {
    const uint8_t *begin, *end;
  };
  struct Cursor {  // at what is left of the run that is being fetched
    const uint8_t *at = nullptr, *end = nullptr;
    int taken = 0;  // runs
  };

  inline __attribute__((always_inline)) void fetch(Cursor& cursor, int lines) {
    if (cursor.end - cursor.at < lines * kLineBytes) return fetch_over_runs(cursor, lines);
    for (int i = 0; i < lines; ++i) __builtin_prefetch(cursor.at + i * kLineBytes, 0, 2);
    cursor.at += lines * kLineBytes;
  }

  __attribute__((noinline)) void fetch_over_runs(Cursor& cursor, int lines) {
    for (; lines > 0; --lines) {
      if (cursor.at >= cursor.end) {
        if (cursor.taken == count_) return;
        cursor.at = runs_[cursor.taken].begin;
        cursor.end = runs_[cursor.taken++].end;
      }
      __builtin_prefetch(cursor.at, 0, 2);
      cursor.at += kLineBytes;
    }
  }

  Run runs_[kRuns];
  Cursor first_, again_;
  int count_ = 0, waits_ = 0;
};

}  // namespace
