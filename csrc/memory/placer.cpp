#include "placer.h"

#include <stdexcept>

namespace kvell::memory {
namespace {

[[noreturn]] void throw_infeasible() {
  throw std::logic_error("placement was asked for an infeasible demand");
}

}  // namespace

void Placer::place(int32_t holder, int32_t group, int64_t need, int64_t demand, Counts& left,
                   std::vector<int32_t>& out) {
  if (pool_.is_alone(group)) return place_alone(holder, group, need, left, out);
  while (need) {
    const int32_t large = find_large(holder, group, demand, left);
    if (large < 0) {
      make_room(group, demand, left, need);
      continue;
    }
    const size_t before = out.size();
    pool_.take(large, need, out);
    const int64_t taken = int64_t(out.size() - before);
    need -= taken;
    demand -= taken;
    left[group] -= taken;
  }
}

// The same where each page takes a large page: none is shared, nor has an empty page.
void Placer::place_alone(int32_t holder, int32_t group, int64_t need, Counts& left,
                         std::vector<int32_t>& out) {
  for (; need; --need) {
    const bool spare = pool_.supply().may_take_whole(group, left);
    int32_t slot = spare ? pool_.take_alone(group, holder) : -1;
    if (slot < 0) {
      if (!spare || !pool_.oldest_large()) throw_infeasible();
      evict_large(pool_.oldest_large()->id());
      slot = pool_.take_alone(group, holder);
    }
    ++rungs_[kOwnLargePage];
    --left[group];
    out.push_back(slot);
  }
}

// A large page of the group with an empty page, by the first rungs of the ladder.
int32_t Placer::find_large(int32_t holder, int32_t group, int64_t demand, const Counts& left) {
  const bool spare = pool_.supply().may_take_whole(group, left), in_use = !spare;
  int32_t large = pool_.rooms().own(group, holder, in_use);
  if (large >= 0) return counted(kOwnPage, large);
  if (literal_order_) return in_literal_order(holder, group, demand, spare);
  if (spare && demand >= groups_[group].pages_per_large) {
    large = pool_.claim_large(group, holder);
    if (large >= 0) return counted(kOwnLargePage, large);
  }
  const bool saves = spare && saves_large(group);
  large = pool_.rooms().shared(group, demand, in_use);
  if (large < 0 && spare && !saves) large = pool_.claim_large(group, kShared);
  if (large >= 0) return counted(kSharedPage, large);
  large = pool_.rooms().others(group, in_use || saves);
  return large >= 0 ? counted(kOthersPage, large) : -1;
}

// Where large pages are scarce, a page beside used ones is taken before an empty large page is
// begun: the large page can serve any group, the page none but its own.
bool Placer::saves_large(int32_t group) const {
  if (!pool_.is_scarce() || pool_.supply().has_shares()) return false;
  if (pool_.rooms().others(group, true) >= 0) return true;
  const Entry* hole = pool_.oldest_page(group, true);
  return hole && gives_way(*hole);
}

// Is a cached page beside used ones old enough to go before the large page that is next?
bool Placer::gives_way(const Entry& hole) const {
  const Entry* large = pool_.oldest_large();
  if (!large || rank_of(hole.key()) < kNormal) return true;
  return hits_.is_old(pool_.age(hole.key()), pool_.age(large->key()));
}

// Jenga §5.4, steps 2 to 4: a large page of its own, be it by eviction, comes first.
int32_t Placer::in_literal_order(int32_t holder, int32_t group, int64_t demand, bool spare) {
  int32_t large = spare ? pool_.claim_large(group, holder) : -1;
  if (large >= 0) return counted(kOwnLargePage, large);
  if (spare && pool_.oldest_large()) return -1;
  large = pool_.rooms().shared(group, demand, !spare);
  if (large >= 0) return counted(kSharedPage, large);
  large = pool_.rooms().others(group, !spare);
  return large >= 0 ? counted(kOthersPage, large) : -1;
}

// Evicts a large page or a page of the group, whichever the keys call for; a group with a
// share of its own evicts its own pages only. Where large pages are scarce, cached pages
// beside used ones go first, unless they are young: nobody else could get them.
void Placer::make_room(int32_t group, int64_t demand, const Counts& left, int64_t need) {
  if (!literal_order_ && pool_.is_scarce())
    if (const Entry* hole = pool_.oldest_page(group, true); hole && gives_way(*hole))
      return evict_beside(group, hole->id(), need);
  const bool may_whole = pool_.supply().may_take_whole(group, left);
  const bool fills = literal_order_ || demand >= groups_[group].pages_per_large;
  const Entry* large = may_whole && !pool_.supply().has_shares() ? pool_.oldest_large() : nullptr;
  if (large && fills) return evict_large(large->id());
  const Entry* page = pool_.oldest_page(group, !may_whole);
  if (large && (!page || pool_.place(large->key()) < pool_.place(page->key())))
    return evict_large(large->id());
  if (!page) throw_infeasible();
  evict_beside(group, page->id(), need);
}

// Evicts a cached page, and of those beside it as many as are needed if their large page is
// in use, the oldest first: the holder then has them side by side. What is younger stays, unless
// it is only kept while memory is idle.
void Placer::evict_beside(int32_t group, int32_t slot, int64_t need) {
  const int32_t id = pool_.large_of(slot);
  if (need == 1 || literal_order_ || !pool_.large(id).used) return evict_page(group, slot);
  const Place first = pool_.place(pool_.page(slot).key);
  victims_.clear();
  for (int32_t i = 0; i < pool_.per_large(group); ++i) {
    const PageRecord& page = pool_.page(pool_.first_slot(id) + i);
    if (!page.cached()) continue;
    const Place place = pool_.place(page.key);
    if (place.rank < kNormal || place.is_no_younger(first))
      victims_.push_back({place, pool_.first_slot(id) + i});
  }
  std::sort(victims_.begin(), victims_.end(), [](const Victim& a, const Victim& b) {
    return a.place < b.place || (!(b.place < a.place) && a.slot < b.slot);
  });
  going_.clear();
  for (const Victim& victim : victims_) {
    if (int64_t(going_.size()) == need) break;
    going_.push_back(victim.slot);
    forget(group, victim.slot);
  }
  rungs_[kEvictPage] += int64_t(going_.size());
  pool_.evict_beside(going_);
}

int32_t Placer::vacate(int32_t group, int32_t holder) {
  int32_t large = pool_.claim_large(group, holder);
  if (large < 0 && pool_.oldest_large()) {
    evict_large(pool_.oldest_large()->id());
    large = pool_.claim_large(group, holder);
  }
  if (large < 0) throw std::logic_error("no large page is without a used page");
  return large;
}

int32_t Placer::denser(int32_t group, int32_t than) {
  const auto is_denser = [&](int32_t large) {
    const int32_t used = pool_.large(large).used, own = pool_.large(than).used;
    return used > own || (used == own && large < than);
  };
  for (const int32_t large : {pool_.rooms().shared(group, 1, true), pool_.rooms().others(group, true)})
    if (large >= 0 && is_denser(large)) return large;
  const Entry* hole = pool_.oldest_page(group, true);
  const int32_t large = hole ? pool_.large_of(hole->id()) : -1;
  if (large < 0 || !is_denser(large)) return -1;
  evict_page(group, hole->id());
  return large;
}

void Placer::evict_large(int32_t id) {
  ++rungs_[kEvictLarge];
  const int32_t group = pool_.large(id).group(), first = pool_.first_slot(id);
  for (int32_t slot = first; slot < first + pool_.per_large(group); ++slot)
    if (pool_.page(slot).cached()) forget(group, slot);
  pool_.empty_large(id);
}

void Placer::evict_page(int32_t group, int32_t slot) {
  ++rungs_[kEvictPage];
  evict(group, slot);
}

std::vector<int32_t> Placer::keep(int32_t group, int64_t count, int64_t rank,
                                  const Place& limit) {
  std::vector<int32_t> slots;
  while (int64_t(slots.size()) < count) {
    const int32_t large = find_kept(group, count - int64_t(slots.size()), keeper(rank));
    if (large >= 0) {
      pool_.take(large, 1, slots);
    } else if (!displace(group, limit)) {
      for (const int32_t slot : slots) pool_.release(slot);
      ++rungs_[kSkipCheckpoint];
      return {};
    }
  }
  ++rungs_[kCheckpoint];
  return slots;
}

int32_t Placer::find_kept(int32_t group, int64_t count, int32_t keeper) {
  int32_t large = pool_.rooms().own(group, keeper, false);
  if (large < 0) large = pool_.claim_large(group, keeper);
  if (large < 0) large = pool_.rooms().shared(group, count, false);
  return large >= 0 ? large : pool_.rooms().others(group, false);
}

// Evicts the large page or page of the group that goes first, if below `limit`.
bool Placer::displace(int32_t group, const Place& limit) {
  const Entry* large = pool_.supply().has_shares() ? nullptr : pool_.oldest_large();
  const Entry* page = pool_.oldest_page(group, false);
  const Place of_large = large ? pool_.place(large->key()) : limit;
  const Place of_page = page ? pool_.place(page->key()) : limit;
  if (of_large < limit && (!page || !(of_page < of_large)))
    evict_large(large->id());
  else if (of_page < limit)
    evict_page(group, page->id());
  else
    return false;
  return true;
}

void Placer::evict_unused() {
  for (int32_t id = 0; id < pool_.empties().num_touched(); ++id) {
    const int32_t group = pool_.large(id).group(), first = pool_.first_slot(id);
    const int32_t count = group < 0 ? 0 : pool_.per_large(group);
    for (int32_t i = 0; i < count && pool_.large(id).cached; ++i)
      if (pool_.page(first + i).cached()) evict(group, first + i);
  }
}

void Placer::evict(int32_t group, int32_t slot) {
  forget(group, slot);
  pool_.evict(slot);
}

// The index names the page no longer.
void Placer::forget(int32_t group, int32_t slot) {
  const int64_t rank = rank_of(pool_.page(slot).key);
  changes_.dropped(group, slot, pool_.page(slot).end);
  const Named named = tree_.drop(group, slot);
  const Sort sort = Sort(named.tag);
  if (sort == Sort::kPromptEnd && !named.part) usefulness_.note_wasted(sort, rank);
  ++evicted_[group];
}

}  // namespace kvell::memory
