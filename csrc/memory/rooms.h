// Large pages with an empty page, by whose they are: a holder's serve it first, the others are
// shared out to all holders of the group (association of holders, tests/oracle/pages/pool.py).
#pragma once
#include "handles.h"
#include "idset.h"
#include "records.h"
#include "rules.h"

namespace kvell::memory {

class Rooms {
 public:
  Rooms(const Groups& groups, ZeroArray<LargeRecord>& larges, int32_t num_large);
  void add_groups();

  void open_holder(int32_t holder) { live_.insert(holder, true); }
  // What was associated with it is shared.
  void close_holder(int32_t holder);
  bool is_live(int32_t owner) const { return live_.find(owner); }

  // The picks: a large page with an empty page, or -1. With `in_use` it has a used page too.
  int32_t own(int32_t group, int32_t holder, bool in_use) const;
  int32_t shared(int32_t group, int64_t want, bool in_use) const;
  int32_t others(int32_t group, bool in_use) const;

  // The large page is among the picks, if it has an empty page; it is not.
  void list(int32_t id);
  void unlist(int32_t id);

 private:
  // Keepers come before holders, the one of the higher rank first.
  static uint64_t rank_of_owner(int32_t owner) {
    return uint64_t(uint32_t(owner - keeper(2))) << 32;
  }
  static uint64_t by_owner(int32_t owner, int32_t id) {
    return rank_of_owner(owner) | uint32_t(id);
  }
  int64_t by_room(int64_t room, int32_t id) const { return room << large_bits_ | id; }
  int32_t id_in_room(int64_t entry) const {
    return int32_t(entry & ((int64_t(1) << large_bits_) - 1));
  }
  using Owned = std::vector<uint64_t>;
  static Owned::const_iterator first_of(const Owned& owned, uint64_t entry) {
    return std::lower_bound(owned.begin(), owned.end(), entry);
  }
  bool usable(int32_t id, bool in_use) const { return !in_use || larges_[id].used; }

  struct OfGroup {
    explicit OfGroup(int64_t rooms) : shared(rooms) {}
    IdSet shared;  // by room: see by_room
    Owned owned;   // in order of by_owner: few, and looked at most often
  };

  const Groups& groups_;
  ZeroArray<LargeRecord>& larges_;
  const int32_t large_bits_;  // of the id of a large page
  std::vector<OfGroup> by_group_;
  HandleMap<bool> live_;  // holders, and keepers
};

}  // namespace kvell::memory
