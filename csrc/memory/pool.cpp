#include "pool.h"

#include <numeric>
#include <stdexcept>

namespace kvell::memory {
namespace {

int32_t bits_for(int64_t count) {
  int32_t bits = 0;
  while ((int64_t(1) << bits) < count) ++bits;
  return bits;
}

int32_t shift_for(const Groups& groups) {
  int32_t most = 1;
  for (const Rules& group : groups) most = std::max(most, group.pages_per_large);
  return bits_for(most);
}

int64_t slots_for(int32_t shift, int32_t num_large) {
  const int64_t slots = int64_t(num_large) << shift;
  if (slots >= int64_t(1) << 31) throw std::invalid_argument("more pages than 32 bits can name");
  return slots;
}

int32_t words_for(const Groups& groups) {
  int32_t most = 1;
  for (const Rules& group : groups) most = std::max(most, group.pages_per_large);
  return (most + 63) / 64;
}

int32_t id_of(uint64_t entry) { return int32_t(uint32_t(entry)); }

}  // namespace

Pool::Pool(const Groups& groups, int32_t num_large, const Counts& quotas,
           const EvictionRule& rule)
    : groups_(groups),
      rule_(rule),
      num_large_(num_large),
      large_bits_(bits_for(num_large)),
      shift_(shift_for(groups)),
      words_(words_for(groups)),
      pages_(slots_for(shift_, num_large)),
      larges_(num_large),
      masks_(size_t(num_large) * words_),
      evictable_(larges_, rule),
      returned_(num_large),
      withheld_(num_large),
      whole_(num_large),
      partial_(groups.size(), 0),
      quotas_(quotas),
      claimed_(groups.size(), 0),
      in_use_(groups.size(), 0),
      cached_pages_(groups.size(), 0),
      unwritten_(groups.size(), 0),
      thinned_(groups.size(), 0) {
  const int64_t shares = std::accumulate(quotas.begin(), quotas.end(), int64_t(0));
  if (shares > num_large)
    throw std::invalid_argument("shares of " + std::to_string(shares) +
                                " large pages in a pool of " + std::to_string(num_large));
  add_lists();
  for (const int64_t rank : {0, 1, 2}) live_.insert(keeper(rank), true);
}

void Pool::check_size(const Groups& more) const { slots_for(shift_for(more), num_large_); }

bool Pool::add_groups() {
  for (Counts* counts : {&partial_, &claimed_, &in_use_, &cached_pages_, &unwritten_, &thinned_})
    counts->resize(groups_.size(), 0);
  add_lists();
  widen_masks(words_for(groups_));
  if (shift_for(groups_) == shift_) return false;
  rename_slots(shift_for(groups_));
  return true;
}

void Pool::add_lists() {
  while (lists_.size() < groups_.size())
    lists_.emplace_back(pages_, by_room(per_large(int32_t(lists_.size())), 0), rule_);
}

void Pool::rename_slots(int32_t shift) {
  ZeroArray<PageRecord> wider(slots_for(shift, num_large_));
  old_shift_ = shift_;
  shift_ = shift;
  for (int32_t id = 0; id < next_fresh_; ++id) {
    const int32_t count = larges_[id].group() < 0 ? 0 : per_large(larges_[id].group());
    for (int32_t i = 0; i < count; ++i) wider[first_slot(id) + i] = pages_[(id << old_shift_) + i];
  }
  pages_ = std::move(wider);
  for (GroupLists& lists : lists_) {
    lists.cached.rename([this](int32_t slot) { return renamed(slot); });
    lists.aside.rename([this](int32_t slot) { return renamed(slot); });
  }
}

void Pool::widen_masks(int32_t words) {
  if (words == words_) return;
  ZeroArray<uint64_t> wider(size_t(num_large_) * words);
  for (int32_t id = 0; id < next_fresh_; ++id)
    for (int32_t word = 0; word < words_; ++word)
      wider[size_t(id) * words + word] = mask_word(id, word);
  masks_ = std::move(wider);
  words_ = words;
}

// -------------------------------------------------------------- what there is

namespace {

int64_t whole_needed(int64_t need, int64_t partial, int64_t per_large) {
  return need > partial ? ceil_div(need - partial, per_large) : 0;
}

}  // namespace

int64_t Pool::shortage(const Counts& need) const {
  int64_t sum = 0;
  for (size_t g = 0; g < need.size(); ++g)
    sum += whole_needed(need[g], partial_[g], per_large(g));
  return sum - whole_;
}

bool Pool::feasible(const Counts& need) const {
  for (size_t g = 0; has_shares() && g < need.size(); ++g)
    if (whole_needed(need[g], partial_[g], per_large(g)) > quotas_[g] - in_use_[g]) return false;
  return shortage(need) <= 0;
}

bool Pool::may_take_whole(int32_t group, const Counts& left) const {
  if (has_shares()) return in_use_[group] < quotas_[group];
  if (left[group] > partial_[group]) return true;
  // No group needs more large pages than pages; most often that is enough to know.
  int64_t most = 0, sum = 0;
  for (size_t g = 0; g < left.size(); ++g) most += std::max<int64_t>(0, left[g] - partial_[g]);
  if (most < whole_) return true;
  for (size_t g = 0; g < left.size(); ++g) sum += whole_needed(left[g], partial_[g], per_large(g));
  return sum < whole_;
}

Division Pool::division() const {
  Division found{num_large_ - num_withheld_, in_use_, cached_pages_, unwritten_, partial_};
  for (size_t g = 0; g < groups_.size(); ++g) {
    found.empty_large -= claimed_[g];
    found.used[g] = in_use_[g] * per_large(g) - partial_[g];
    found.stranded[g] -= unwritten_[g];
  }
  return found;
}

// ------------------------------------------------------ association of holders

void Pool::close_holder(int32_t holder) {
  live_.erase(holder);
  const uint64_t first = rank_of_owner(holder);
  for (GroupLists& lists : lists_) {
    const auto mine = first_of(lists.owned, first);
    auto end = mine;
    for (; end != lists.owned.end() && *end >> 32 == first >> 32; ++end) {
      const int32_t id = id_of(*end);
      larges_[id].owner = kShared;
      lists.shared.insert(by_room(larges_[id].room, id));
    }
    lists.owned.erase(mine, end);
  }
}

int32_t Pool::own_large(int32_t group, int32_t holder, bool in_use) const {
  const auto& owned = lists_[group].owned;
  const uint64_t first = rank_of_owner(holder);
  for (auto at = first_of(owned, first); at != owned.end() && *at >> 32 == first >> 32; ++at)
    if (usable(id_of(*at), in_use)) return id_of(*at);
  return -1;
}

int32_t Pool::shared_large(int32_t group, int64_t want, bool in_use) const {
  const IdSet& shared = lists_[group].shared;
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

int32_t Pool::others_large(int32_t group, bool in_use) const {
  const auto& owned = lists_[group].owned;
  for (auto at = owned.rbegin(); at != owned.rend(); ++at)
    if (usable(id_of(*at), in_use)) return id_of(*at);
  return -1;
}

int32_t Pool::claim_large(int32_t group, int32_t holder) {
  if (has_shares() && claimed_[group] >= quotas_[group]) return -1;
  const int32_t id = next_empty();
  if (id < 0) return -1;
  ++claimed_[group];
  LargeRecord& large = larges_[id];
  large.group_plus_one = group + 1;
  large.owner = holder;
  large.room = per_large(group);
  for (int32_t left = large.room, word = 0; left > 0; left -= 64, ++word)
    masks_[size_t(id) * words_ + word] = left >= 64 ? ~uint64_t(0) : (uint64_t(1) << left) - 1;
  return id;
}

int32_t Pool::take_alone(int32_t group, int32_t holder) {
  const int32_t id = next_empty();
  if (id < 0) return -1;
  LargeRecord& large = larges_[id];
  large.group_plus_one = group + 1;
  large.owner = holder;
  large.used = large.written = 1;
  ++claimed_[group];
  ++in_use_[group];
  --whole_;
  pages_[first_slot(id)].refs = 1;
  return first_slot(id);
}

// The lowest that is to be had.
int32_t Pool::next_empty() {
  if (!returned_.empty()) {
    const int64_t id = returned_.lowest();
    returned_.erase(id);
    return int32_t(id);
  }
  while (next_fresh_ < num_large_)
    if (const int32_t id = next_fresh_++; !withheld_[id]) return id;
  return -1;
}

void Pool::withhold(int32_t id) {
  withheld_[id] = true;
  returned_.erase(id);
  ++num_withheld_;
  --whole_;
}

void Pool::restore(int32_t id) {
  withheld_[id] = false;
  --num_withheld_;
  ++whole_;
  ++freed_;
  if (id < next_fresh_) returned_.insert(id);
}

void Pool::list(int32_t id) {
  LargeRecord& large = larges_[id];
  if (large.listed || !large.room) return;
  GroupLists& lists = lists_[large.group()];
  if (large.owner == kShared)
    lists.shared.insert(by_room(large.room, id));
  else
    lists.owned.insert(first_of(lists.owned, by_owner(large.owner, id)), by_owner(large.owner, id));
  large.listed = 1;
}

void Pool::unlist(int32_t id) {
  LargeRecord& large = larges_[id];
  if (!large.listed) return;
  GroupLists& lists = lists_[large.group()];
  if (large.owner == kShared)
    lists.shared.erase(by_room(large.room, id));
  else
    lists.owned.erase(first_of(lists.owned, by_owner(large.owner, id)));
  large.listed = 0;
}

// ----------------------------------------------------------------- small pages

void Pool::take(int32_t id, int64_t count, std::vector<int32_t>& out) {
  LargeRecord& large = larges_[id];
  const int32_t taken = int32_t(std::min<int64_t>(count, large.room));
  // Those of an owner do not lie by room.
  if (large.owner == kShared || taken == large.room) unlist(id);
  uint64_t* words = &masks_[size_t(id) * words_];
  for (int32_t left = taken, word = 0; left; ) {
    if (!words[word]) {
      ++word;
      continue;
    }
    const int32_t slot = first_slot(id) + word * 64 + __builtin_ctzll(words[word]);
    words[word] &= words[word] - 1;
    pages_[slot].refs = 1;
    out.push_back(slot);
    --left;
  }
  const int32_t written = taken ? out.back() - first_slot(id) + 1 : 0;
  if (written > large.written) {
    if (large.used) unwritten_[large.group()] -= written - large.written;
    large.written = written;
  }
  large.room -= taken;
  use(id, taken);
  list(id);
}

void Pool::acquire(int32_t slot) {
  PageRecord& page = pages_[slot];
  const bool was_cached = page.cached();
  if (was_cached) uncache(slot);
  ++page.refs;
  if (was_cached) use(large_of(slot), 1);
}

void Pool::release(int32_t slot, const Key& renewed) {
  PageRecord& page = pages_[slot];
  if (page.node && page.key < renewed) page.key = renewed;
  release(slot);
}

void Pool::release(int32_t slot) {
  PageRecord& page = pages_[slot];
  if (--page.refs) {
    if (page.refs == 1 && is_sparse(large_of(slot))) ++thinned_[larges_[large_of(slot)].group()];
    return;
  }
  ++freed_;
  const int32_t id = large_of(slot);
  unuse(id);
  if (page.node) {
    cache(slot);
  } else {
    make_empty(id, &slot, 1);
  }
  settle(id);
}

void Pool::renew(int32_t slot, const Key& key) {
  PageRecord& page = pages_[slot];
  if (!(page.key < key)) return;
  if (!page.cached()) {
    page.key = key;
    return;
  }
  const int32_t id = large_of(slot);
  GroupLists& lists = lists_[larges_[id].group()];
  if (page.run == kAlone) {
    page.key = key;
  } else if (page.run & kAside) {
    lists.aside.remove(slot);
    page.key = key;
    lists.aside.push(slot);
  } else {
    lists.cached.remove(slot);
    page.key = key;
    lists.cached.push(slot);
  }
  if (!larges_[id].run) return;
  // By age alone it goes later or where it did; by worth it may go sooner.
  if (!rule_.learns() && !(larges_[id].key < key)) return;
  evictable_.remove(id);
  make_evictable(id, rule_.learns() ? youngest(id) : key);
}

void Pool::evict(int32_t slot) {
  const int32_t id = large_of(slot);
  // Its youngest page gives an evictable large page its place.
  if (larges_[id].run && (rule_.learns() || !(pages_[slot].key < larges_[id].key)))
    evictable_.remove(id);
  uncache(slot);
  pages_[slot].node = 0;
  make_empty(id, &slot, 1);
  settle(id);
}

void Pool::evict_beside(const std::vector<int32_t>& slots) {
  for (const int32_t slot : slots) {
    uncache(slot);
    pages_[slot].node = 0;
  }
  make_empty(large_of(slots[0]), slots.data(), slots.size());
}

void Pool::empty_large(int32_t id) {
  evictable_.remove(id);
  if (!evictable_.empty()) pages_.fetch(first_slot(evictable_.top().id()));
  const int32_t first = first_slot(id), end = first + per_large(larges_[id].group());
  for (int32_t slot = first; slot < end; ++slot) {
    if (!pages_[slot].cached()) continue;
    uncache(slot);
    pages_[slot].node = 0;
  }
  give_back(id);
}

void Pool::cache(int32_t slot) {
  LargeRecord& large = larges_[large_of(slot)];
  ++large.cached;
  ++cached_pages_[large.group()];
  if (is_alone(large.group()))
    pages_[slot].run = kAlone;
  else
    lists_[large.group()].cached.push(slot);
}

void Pool::uncache(int32_t slot) {
  LargeRecord& large = larges_[large_of(slot)];
  GroupLists& lists = lists_[large.group()];
  --large.cached;
  --cached_pages_[large.group()];
  if (pages_[slot].run == kAlone)
    pages_[slot].run = 0;
  else if (pages_[slot].run & kAside)
    lists.aside.remove(slot);
  else
    lists.cached.remove(slot);
}

void Pool::make_empty(int32_t id, const int32_t* slots, size_t count) {
  LargeRecord& large = larges_[id];
  if (!large.room && !live_.find(large.owner)) large.owner = kShared;
  if (large.owner == kShared) unlist(id);
  for (size_t i = 0; i < count; ++i) {
    const int32_t index = slots[i] - first_slot(id);
    masks_[size_t(id) * words_ + index / 64] |= uint64_t(1) << index % 64;
  }
  large.room += int32_t(count);
  if (large.used || large.cached) list(id);
}

// --------------------------------------------------------- states of large pages

void Pool::use(int32_t id, int32_t count) {
  LargeRecord& large = larges_[id];
  int64_t& partial = partial_[large.group()];
  if (large.used) {
    partial -= count;
  } else {
    --whole_;
    ++in_use_[large.group()];
    partial += per_large(large.group()) - count;
    unwritten_[large.group()] += per_large(large.group()) - large.written;
    if (large.run) evictable_.remove(id);
    if (large.cached) bring_back(id);
  }
  large.used += count;
}

// Its cached pages lie beside used ones from now on.
void Pool::bring_back(int32_t id) {
  GroupLists& lists = lists_[larges_[id].group()];
  if (lists.aside.empty()) return;
  const int32_t first = first_slot(id), end = first + per_large(larges_[id].group());
  for (int32_t slot = first; slot < end; ++slot) {
    if (!(pages_[slot].run & kAside)) continue;
    lists.aside.remove(slot);
    lists.cached.push(slot);
  }
}

void Pool::unuse(int32_t id) {
  LargeRecord& large = larges_[id];
  int64_t& partial = partial_[large.group()];
  const bool was_sparse = is_sparse(id);
  if (--large.used) {
    if (!was_sparse && is_sparse(id)) ++thinned_[large.group()];
    ++partial;
  } else {
    partial -= per_large(large.group()) - 1;
    unwritten_[large.group()] -= per_large(large.group()) - large.written;
    --in_use_[large.group()];
    ++whole_;
  }
}

// After a page of it lost its use or its cached content.
void Pool::settle(int32_t id) {
  LargeRecord& large = larges_[id];
  if (large.used) return;
  if (large.cached) {
    if (!large.run) make_evictable(id, youngest(id));
    return;
  }
  give_back(id);
}

void Pool::make_evictable(int32_t id, const Key& youngest) {
  larges_[id].key = youngest;
  evictable_.push(id);
}

// It is in no group any more.
void Pool::give_back(int32_t id) {
  LargeRecord& large = larges_[id];
  unlist(id);
  uint64_t* words = &masks_[size_t(id) * words_];
  std::fill(words, words + words_, 0);
  --claimed_[large.group()];
  large = LargeRecord{};
  returned_.insert(id);
}

Key Pool::youngest(int32_t id) const {
  const int32_t first = first_slot(id), end = first + per_large(larges_[id].group());
  Key key;
  if (!rule_.learns()) {
    for (int32_t slot = first; slot < end; ++slot)
      if (pages_[slot].cached() && key < pages_[slot].key) key = pages_[slot].key;
    return key;
  }
  Place last{-1, 0.0, 0, 0};
  double worth = 0.0;
  uint64_t of = 0;  // the stamp that this is the worth of: neighbours have the same
  for (int32_t slot = first; slot < end; ++slot) {
    const PageRecord& page = pages_[slot];
    if (!page.cached()) continue;
    if (page.key.stamp != of) worth = rule_.worth(page.key);
    of = page.key.stamp;
    const Place place{rank_of(page.key), worth, time_of(page.key), page.key.shortness};
    if (!(last < place)) continue;
    last = place;
    key = page.key;
  }
  return key;
}

// ------------------------------------------------------------- who goes first

const Entry* Pool::oldest_large() {
  if (evictable_.empty()) return nullptr;
  while (rule_.learns()) {
    const int32_t id = evictable_.top().id();
    const Key last = youngest(id);
    if (last == larges_[id].key) break;
    evictable_.remove(id);  // since then another of its pages became the last to go
    make_evictable(id, last);
  }
  return &evictable_.top();
}

const Entry* Pool::oldest_page(int32_t group, bool in_use) {
  GroupLists& lists = lists_[group];
  if (in_use) {
    if (per_large(group) == 1) return nullptr;
    while (!lists.cached.empty() && !larges_[large_of(lists.cached.top().id())].used) {
      const int32_t slot = lists.cached.top().id();
      larges_.fetch(large_of(lists.cached.next()));
      lists.cached.remove(slot);
      lists.aside.push(slot);
    }
    return lists.cached.empty() ? nullptr : &lists.cached.top();
  }
  if (lists.aside.empty()) return lists.cached.empty() ? nullptr : &lists.cached.top();
  if (lists.cached.empty()) return &lists.aside.top();
  const Entry *cached = &lists.cached.top(), *aside = &lists.aside.top();
  if (!rule_.learns()) return *aside < *cached ? aside : cached;
  const Place one = place(cached->key()), other = place(aside->key());
  if (one < other) return cached;
  return other < one || aside->id() < cached->id() ? aside : cached;
}

}  // namespace kvell::memory
