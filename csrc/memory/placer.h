// Placing the pages of one holder: association by demand, eviction last
// (tests/oracle/placement/placement.py, rung for rung).
#pragma once
#include <array>

#include "changes.h"
#include "hit_share.h"
#include "radix.h"
#include "usefulness.h"

namespace kvell::memory {

// In the order of RUNGS in tests/oracle/placement/placement.py.
enum Rung {
  kOwnPage,
  kOwnLargePage,
  kSharedPage,
  kOthersPage,
  kEvictLarge,
  kEvictPage,
  kCheckpoint,
  kSkipCheckpoint,
  kRungs
};

class Placer {
 public:
  Placer(const Groups& groups, Pool& pool, RadixTree& tree, IndexChanges& changes,
         Usefulness& usefulness, bool literal_order)
      : groups_(groups),
        pool_(pool),
        tree_(tree),
        changes_(changes),
        usefulness_(usefulness),
        literal_order_(literal_order),
        evicted_(groups.size(), 0) {}

  // Appends `need` slots of `group` to `out`. `demand` is what the holder is known to
  // want from now on; `left`, counted down, what the whole call still has to place.
  void place(int32_t holder, int32_t group, int64_t need, int64_t demand, Counts& left,
             std::vector<int32_t>& out);

  // Slots for something to be cached with this rank; none if there are not enough. Nobody
  // who is running is in its way, and only cached pages below `limit` give way.
  std::vector<int32_t> keep(int32_t group, int64_t count, int64_t rank, const Place& limit);

  // An empty large page for the holder alone; there is one, or one that may be evicted.
  int32_t vacate(int32_t group, int32_t holder);

  // A large page with an empty page and more used pages than another has, or as many and a lower
  // id; an old cached page may become empty for it. -1: there is none.
  int32_t denser(int32_t group, int32_t than);

  // What lately came of caching.
  HitShare& hits() { return hits_; }
  bool is_literal() const { return literal_order_; }
  void add_groups() { evicted_.resize(groups_.size(), 0); }

  // The cached pages of an evictable large page become empty, and so does it.
  void evict_large(int32_t large);

  // A cached page becomes empty.
  void evict_cached(int32_t group, int32_t slot) { evict(group, slot); }

  // Every cached page without a user becomes empty.
  void evict_unused();

  const Counts& evicted_pages() const { return evicted_; }
  const std::array<int64_t, kRungs>& rungs() const { return rungs_; }

 private:
  void place_alone(int32_t holder, int32_t group, int64_t need, Counts& left,
                   std::vector<int32_t>& out);
  int32_t find_large(int32_t holder, int32_t group, int64_t demand, const Counts& left);
  bool saves_large(int32_t group) const;
  bool gives_way(const Entry& hole) const;
  int32_t in_literal_order(int32_t holder, int32_t group, int64_t demand, bool spare);
  void make_room(int32_t group, int64_t demand, const Counts& left, int64_t need);
  void evict_beside(int32_t group, int32_t slot, int64_t need);
  int32_t find_kept(int32_t group, int64_t count, int32_t keeper);
  bool displace(int32_t group, const Place& limit);
  void evict_page(int32_t group, int32_t slot);
  void evict(int32_t group, int32_t slot);
  void forget(int32_t group, int32_t slot);
  int32_t counted(Rung rung, int32_t large) {
    ++rungs_[rung];
    return large;
  }

  const Groups& groups_;
  Pool& pool_;
  RadixTree& tree_;
  IndexChanges& changes_;
  Usefulness& usefulness_;
  const bool literal_order_;
  HitShare hits_;
  Counts evicted_;
  std::array<int64_t, kRungs> rungs_{};
  struct Victim {
    Place place;
    int32_t slot;
  };
  std::vector<Victim> victims_;  // scratch
  std::vector<int32_t> going_;   // scratch
};

}  // namespace kvell::memory
