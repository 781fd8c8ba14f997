// Placing the pages of one holder: association by demand, eviction last
// (prefix/placement.py, rung for rung).
#pragma once
#include <array>

#include "radix.h"

namespace kvell::memory {

enum Rung { kOwnPage, kOwnLargePage, kSharedPage, kOthersPage, kEvictLarge, kEvictPage, kRungs };

class Placer {
 public:
  Placer(const Groups& groups, Pool& pool, RadixTree& tree, bool literal_order)
      : groups_(groups),
        pool_(pool),
        tree_(tree),
        literal_order_(literal_order),
        evicted_(groups.size(), 0) {}

  // Appends `need` slots of `group` to `out`. `demand` is what the holder is known to
  // want from now on; `left`, counted down, what the whole call still has to place.
  void place(int32_t holder, int32_t group, int64_t need, int64_t demand, Counts& left,
             std::vector<int32_t>& out);

  // Every cached page without a user becomes empty.
  void evict_unused();

  const Counts& evicted_pages() const { return evicted_; }
  const std::array<int64_t, kRungs>& rungs() const { return rungs_; }

 private:
  int32_t find_large(int32_t holder, int32_t group, int64_t demand, const Counts& left);
  int32_t in_literal_order(int32_t holder, int32_t group, int64_t demand, bool spare);
  void make_room(int32_t group, int64_t demand, const Counts& left);
  void evict(int32_t group, int32_t slot);
  int32_t counted(Rung rung, int32_t large) {
    ++rungs_[rung];
    return large;
  }

  const Groups groups_;
  Pool& pool_;
  RadixTree& tree_;
  const bool literal_order_;
  Counts evicted_;
  std::array<int64_t, kRungs> rungs_{};
};

}  // namespace kvell::memory
