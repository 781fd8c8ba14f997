#include "rooms.h"

#include <algorithm>

namespace kvell::memory {
namespace {

int32_t id_of(uint64_t entry) { return int32_t(uint32_t(entry)); }

}  // namespace

Rooms::Rooms(const Groups& groups, ZeroArray<LargeRecord>& larges, int32_t num_large)
    : groups_(groups), larges_(larges), large_bits_(bits_for(num_large)) {
  add_groups();
  for (const int64_t rank : {0, 1, 2}) open_holder(keeper(rank));
}

void Rooms::add_groups() {
  while (by_group_.size() < groups_.size())
    by_group_.emplace_back(by_room(groups_[by_group_.size()].pages_per_large, 0));
}

void Rooms::close_holder(int32_t holder) {
  live_.erase(holder);
  const uint64_t first = rank_of_owner(holder);
  for (OfGroup& rooms : by_group_) {
    const auto mine = first_of(rooms.owned, first);
    auto end = mine;
    for (; end != rooms.owned.end() && *end >> 32 == first >> 32; ++end) {
      const int32_t id = id_of(*end);
      larges_[id].owner = kShared;
      rooms.shared.insert(by_room(larges_[id].room, id));
    }
    rooms.owned.erase(mine, end);
  }
}

int32_t Rooms::own(int32_t group, int32_t holder, bool in_use) const {
  const Owned& owned = by_group_[group].owned;
  const uint64_t first = rank_of_owner(holder);
  for (auto at = first_of(owned, first); at != owned.end() && *at >> 32 == first >> 32; ++at)
    if (usable(id_of(*at), in_use)) return id_of(*at);
  return -1;
}

int32_t Rooms::shared(int32_t group, int64_t want, bool in_use) const {
  const IdSet& shared = by_group_[group].shared;
  if (shared.empty()) return -1;
  const int64_t fitting = std::min(by_room(want, 0), shared.bound());
  for (int64_t at = shared.from(fitting); at != IdSet::kNone; at = shared.from(at + 1))
    if (usable(id_in_room(at), in_use)) return id_in_room(at);
  // They fit in none: the lowest of those with the most room.
  for (int64_t last = shared.before(fitting); last != IdSet::kNone; last = shared.before(last)) {
    if (!usable(id_in_room(last), in_use)) continue;
    for (int64_t at = shared.from(by_room(last >> large_bits_, 0));; at = shared.from(at + 1))
      if (usable(id_in_room(at), in_use)) return id_in_room(at);
  }
  return -1;
}

int32_t Rooms::others(int32_t group, bool in_use) const {
  const Owned& owned = by_group_[group].owned;
  for (auto at = owned.rbegin(); at != owned.rend(); ++at)
    if (usable(id_of(*at), in_use)) return id_of(*at);
  return -1;
}

void Rooms::list(int32_t id) {
  LargeRecord& large = larges_[id];
  if (large.listed || !large.room) return;
  OfGroup& rooms = by_group_[large.group()];
  if (large.owner == kShared)
    rooms.shared.insert(by_room(large.room, id));
  else
    rooms.owned.insert(first_of(rooms.owned, by_owner(large.owner, id)),
                       by_owner(large.owner, id));
  large.listed = 1;
}

void Rooms::unlist(int32_t id) {
  LargeRecord& large = larges_[id];
  if (!large.listed) return;
  OfGroup& rooms = by_group_[large.group()];
  if (large.owner == kShared)
    rooms.shared.erase(by_room(large.room, id));
  else
    rooms.owned.erase(first_of(rooms.owned, by_owner(large.owner, id)));
  large.listed = 0;
}

}  // namespace kvell::memory
