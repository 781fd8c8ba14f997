// An ordered set of numbers below a bound: a bit for each, and above each word of bits that is
// not empty a bit again. What is put in, taken out or looked for touches a word or two, where a
// tree walks from node to node and asks the system for memory.
#pragma once
#include <cstdint>
#include <vector>

#include "records.h"

namespace kvell::memory {

// Bits that tell so many numbers apart.
inline int32_t bits_for(int64_t count) {
  int32_t bits = 0;
  while ((int64_t(1) << bits) < count) ++bits;
  return bits;
}

class IdSet {
 public:
  static constexpr int64_t kNone = -1;

  // Of numbers from 0 to `bound` - 1; those that were never in it cost no memory.
  explicit IdSet(int64_t bound) : bound_(bound) {
    int64_t words = bound;
    do {
      words = (words + kMask) >> kShift;
      levels_.emplace_back(size_t(words) + 1);  // the last is never filled: from() looks there
    } while (words > 1);
  }

  int64_t bound() const { return bound_; }
  bool empty() const { return !levels_.back()[0]; }

  void insert(int64_t id) {
    for (Words& words : levels_) {
      uint64_t& word = words[size_t(id >> kShift)];
      const bool was_empty = !word;
      word |= bit(id);
      if (!was_empty) return;
      id >>= kShift;
    }
  }
  void erase(int64_t id) {
    for (Words& words : levels_) {
      uint64_t& word = words[size_t(id >> kShift)];
      word &= ~bit(id);
      if (word) return;
      id >>= kShift;
    }
  }
  // The lowest member; there is one.
  int64_t lowest() const { return down(levels_.size(), 0); }
  // The lowest member that is `id` ≤ bound or more; or kNone.
  int64_t from(int64_t id) const {
    for (size_t level = 0; level < levels_.size(); ++level) {
      const uint64_t rest = levels_[level][size_t(id >> kShift)] >> (id & kMask);
      if (rest) return down(level, id + __builtin_ctzll(rest));
      id = (id >> kShift) + 1;
    }
    return kNone;
  }
  // The highest member below `id` ≤ bound; or kNone.
  int64_t before(int64_t id) const {
    for (size_t level = 0; level < levels_.size() && id > 0; ++level) {
      --id;
      const uint64_t rest = levels_[level][size_t(id >> kShift)] << (kMask - (id & kMask));
      if (rest) {
        id -= __builtin_clzll(rest);
        while (level--) id = id << kShift | (kMask - __builtin_clzll(levels_[level][size_t(id)]));
        return id;
      }
      id >>= kShift;
    }
    return kNone;
  }

 private:
  using Words = ZeroArray<uint64_t>;
  static constexpr int kShift = 6;
  static constexpr int64_t kMask = 63;
  // The lowest number whose bit `id` is of that level.
  int64_t down(size_t level, int64_t id) const {
    while (level--) id = id << kShift | __builtin_ctzll(levels_[level][size_t(id)]);
    return id;
  }
  static uint64_t bit(int64_t id) { return uint64_t(1) << (id & kMask); }

  int64_t bound_;
  std::vector<Words> levels_;  // the last has one word
};

}  // namespace kvell::memory
