#include "placer.h"

#include <stdexcept>

namespace kvell::memory {

void Placer::place(int32_t holder, int32_t group, int64_t need, int64_t demand, Counts& left,
                   std::vector<int32_t>& out) {
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
void Placer::make_room(int32_t group, int64_t demand, const Counts& left, int64_t need) {
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
    evict_large(large->id());
  } else if (page) {
    evict_beside(group, page->id(), need);
  } else {
    throw std::logic_error("placement was asked for an infeasible demand");
  }
}

// Evicts a cached page, and of those beside it as many as are needed if their large page is
// in use, the oldest first: the holder then has them side by side. What is younger stays, unless
// it is only kept while memory is idle.
void Placer::evict_beside(int32_t group, int32_t slot, int64_t need) {
  const int32_t id = pool_.large_of(slot);
  if (need == 1 || literal_order_ || !pool_.large(id).used) return evict_page(group, slot);
  const uint64_t stamp = pool_.page(slot).key.stamp;
  victims_.clear();
  for (int32_t i = 0; i < pool_.per_large(group); ++i) {
    const PageRecord& page = pool_.page(pool_.first_slot(id) + i);
    const bool may_go = rank_of(page.key) < kNormal || page.key.stamp <= stamp;
    if (page.cached() && may_go) victims_.push_back(pool_.first_slot(id) + i);
  }
  std::sort(victims_.begin(), victims_.end(), [this](int32_t a, int32_t b) {
    return Entry(pool_.page(a).key, a) < Entry(pool_.page(b).key, b);
  });
  if (int64_t(victims_.size()) > need) victims_.resize(size_t(need));
  for (const int32_t victim : victims_) evict_page(group, victim);
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

std::vector<int32_t> Placer::keep(int32_t group, int64_t count, int64_t rank, const Key& limit) {
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
  int32_t large = pool_.own_large(group, keeper, false);
  if (large < 0) large = pool_.claim_large(group, keeper);
  if (large < 0) large = pool_.shared_large(group, count, false);
  return large >= 0 ? large : pool_.others_large(group, false);
}

// Evicts the large page or page of the group that goes first, if below `limit`.
bool Placer::displace(int32_t group, const Key& limit) {
  const Entry* large = pool_.has_shares() ? nullptr : pool_.oldest_large();
  const Entry* page = pool_.oldest_page(group, false);
  if (large && large->key() < limit && (!page || !(page->key() < large->key())))
    evict_large(large->id());
  else if (page && page->key() < limit)
    evict_page(group, page->id());
  else
    return false;
  return true;
}

void Placer::evict_unused() {
  for (int32_t id = 0; id < pool_.num_touched(); ++id) {
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
  const Sort sort = Sort(tree_.tag_of(group, slot));
  if (sort == Sort::kPromptEnd && !tree_.part_of(group, slot))
    usefulness_.note_wasted(sort, rank_of(pool_.page(slot).key));
  tree_.drop(group, slot);
  ++evicted_[group];
}

}  // namespace kvell::memory
