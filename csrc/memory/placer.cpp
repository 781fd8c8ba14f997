#include "placer.h"

#include <stdexcept>

namespace kvell::memory {

void Placer::place(int32_t holder, int32_t group, int64_t need, int64_t demand, Counts& left,
                   std::vector<int32_t>& out) {
  while (need) {
    const int32_t large = find_large(holder, group, demand, left);
    if (large < 0) {
      make_room(group, demand, left);
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

// A large page of the group with an empty page, by the first rungs of the ladder.
int32_t Placer::find_large(int32_t holder, int32_t group, int64_t demand, const Counts& left) {
  const bool spare = pool_.may_take_whole(group, left), in_use = !spare;
  int32_t large = pool_.own_large(group, holder, in_use);
  if (large >= 0) return counted(kOwnPage, large);
  if (literal_order_) return in_literal_order(holder, group, demand, spare);
  if (spare && demand >= groups_[group].pages_per_large) {
    large = pool_.claim_large(group, holder);
    if (large >= 0) return counted(kOwnLargePage, large);
  }
  large = pool_.shared_large(group, demand, in_use);
  if (large < 0 && spare) large = pool_.claim_large(group, kShared);
  if (large >= 0) return counted(kSharedPage, large);
  large = pool_.others_large(group, in_use);
  return large >= 0 ? counted(kOthersPage, large) : -1;
}

// Jenga §5.4, steps 2 to 4: a large page of its own, be it by eviction, comes first.
int32_t Placer::in_literal_order(int32_t holder, int32_t group, int64_t demand, bool spare) {
  int32_t large = spare ? pool_.claim_large(group, holder) : -1;
  if (large >= 0) return counted(kOwnLargePage, large);
  if (spare && pool_.oldest_large()) return -1;
  large = pool_.shared_large(group, demand, !spare);
  if (large >= 0) return counted(kSharedPage, large);
  large = pool_.others_large(group, !spare);
  return large >= 0 ? counted(kOthersPage, large) : -1;
}

// Evicts a large page or a page of the group, whichever the keys call for; a group with a
// share of its own evicts its own pages only. Where large pages are scarce, cached pages
// beside used ones go first: nobody else could get them.
void Placer::make_room(int32_t group, int64_t demand, const Counts& left) {
  const bool may_whole = pool_.may_take_whole(group, left);
  const Entry* large = may_whole && !pool_.has_shares() ? pool_.oldest_large() : nullptr;
  const bool holes_first = !literal_order_ && pool_.is_scarce();
  const Entry* page = pool_.oldest_page(group, holes_first || !may_whole);
  if (holes_first && page)
    large = nullptr;
  else if (holes_first)
    page = pool_.oldest_page(group, !may_whole);
  const bool fills = literal_order_ || demand >= groups_[group].pages_per_large;
  if (large && (fills || !page || large->key() < page->key())) {
    ++rungs_[kEvictLarge];
    const int32_t id = large->id(), owner_group = pool_.large(id).group();
    pool_.empty_large(id, [&](int32_t slot) { evict(owner_group, slot); });
  } else if (page) {
    ++rungs_[kEvictPage];
    evict(group, page->id());
  } else {
    throw std::logic_error("placement was asked for an infeasible demand");
  }
}

void Placer::evict_unused() {
  for (int32_t id = 0; id < pool_.num_large(); ++id) {
    const int32_t group = pool_.large(id).group(), first = pool_.first_slot(id);
    const int32_t count = group < 0 ? 0 : pool_.per_large(group);
    for (int32_t i = 0; i < count && pool_.large(id).cached; ++i)
      if (pool_.page(first + i).cached()) evict(group, first + i);
  }
}

void Placer::evict(int32_t group, int32_t slot) {
  tree_.drop(group, slot);
  pool_.evict(slot);
  ++evicted_[group];
}

}  // namespace kvell::memory
