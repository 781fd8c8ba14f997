#include "pool.h"

#include <stdexcept>

namespace kvell::memory {
namespace {

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

}  // namespace

Pool::Pool(const Groups& groups, int32_t num_large, const Counts& quotas,
           const EvictionRule& rule)
    : groups_(groups),
      rule_(rule),
      num_large_(num_large),
      shift_(shift_for(groups)),
      words_(words_for(groups)),
      pages_(slots_for(shift_, num_large)),
      larges_(num_large),
      masks_(size_t(num_large) * words_),
      supply_(groups, num_large, quotas),
      rooms_(groups, larges_, num_large),
      evictable_(larges_, rule),
      empties_(num_large) {
  add_lists();
}

void Pool::check_size(const Groups& more) const { slots_for(shift_for(more), num_large_); }

bool Pool::add_groups() {
  supply_.add_groups();
  rooms_.add_groups();
  add_lists();
  widen_masks(words_for(groups_));
  if (shift_for(groups_) == shift_) return false;
  rename_slots(shift_for(groups_));
  return true;
}

void Pool::add_lists() {
  for (Counts* counts : {&claimed_, &cached_pages_, &unwritten_, &thinned_})
    counts->resize(groups_.size(), 0);
  while (cached_.size() < groups_.size()) {
    const bool is_alone = per_large(int32_t(cached_.size())) == 1 && !supply_.has_shares();
    cached_.emplace_back(pages_, rule_, is_alone);
  }
}

void Pool::rename_slots(int32_t shift) {
  ZeroArray<PageRecord> wider(slots_for(shift, num_large_));
  old_shift_ = shift_;
  shift_ = shift;
  for (int32_t id = 0; id < empties_.num_touched(); ++id) {
    const int32_t count = larges_[id].group() < 0 ? 0 : per_large(larges_[id].group());
    for (int32_t i = 0; i < count; ++i) wider[first_slot(id) + i] = pages_[(id << old_shift_) + i];
  }
  pages_ = std::move(wider);
  for (CachedPages& cached : cached_)
    cached.rename([this](int32_t slot) { return renamed(slot); });
}

void Pool::widen_masks(int32_t words) {
  if (words == words_) return;
  ZeroArray<uint64_t> wider(size_t(num_large_) * words);
  for (int32_t id = 0; id < empties_.num_touched(); ++id)
    for (int32_t word = 0; word < words_; ++word)
      wider[size_t(id) * words + word] = mask_word(id, word);
  masks_ = std::move(wider);
  words_ = words;
}

int64_t Pool::num_empty() const {
  int64_t count = num_large_ - empties_.num_withheld();
  for (const int64_t claimed : claimed_) count -= claimed;
  return count;
}

Division Pool::division() const {
  Division found{num_empty(), supply_.in_use(), cached_pages_, unwritten_, supply_.partial()};
  for (size_t g = 0; g < groups_.size(); ++g) {
    found.used[g] = supply_.in_use()[g] * per_large(g) - supply_.partial()[g];
    found.stranded[g] -= unwritten_[g];
  }
  return found;
}

// ------------------------------------------------------------- empty large pages

int32_t Pool::claim_large(int32_t group, int32_t holder) {
  if (supply_.is_share_claimed(group, claimed_[group])) return -1;
  const int32_t id = empties_.take();
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
  const int32_t id = empties_.take();
  if (id < 0) return -1;
  LargeRecord& large = larges_[id];
  large.group_plus_one = group + 1;
  large.owner = holder;
  large.used = large.written = 1;
  ++claimed_[group];
  supply_.begin_use(group, 1);
  pages_[first_slot(id)].refs = 1;
  return first_slot(id);
}

void Pool::withhold(int32_t id) {
  empties_.withhold(id);
  supply_.withhold();
}

void Pool::restore(int32_t id) {
  empties_.restore(id);
  supply_.restore();
  ++freed_;
}

// ----------------------------------------------------------------- small pages

void Pool::take(int32_t id, int64_t count, std::vector<int32_t>& out) {
  LargeRecord& large = larges_[id];
  const int32_t taken = int32_t(std::min<int64_t>(count, large.room));
  // Those of an owner do not lie by room.
  if (large.owner == kShared || taken == large.room) rooms_.unlist(id);
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
  rooms_.list(id);
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
  const Key old = page.key;
  cached_[larges_[id].group()].renew(slot, key);
  if (!larges_[id].run) return;
  unsettle(id);
  LargeRecord& large = larges_[id];
  if (rank_of(key) == kNormal && class_of(key) != class_of(large.key)) large.is_mixed = true;
  // In one class it goes later or where it did; in another it may go sooner, which counts if it
  // gave the large page its place.
  if (large.is_mixed ? !(old == large.key) : !(large.key < key)) return;
  evictable_.remove(id);
  make_evictable(id, large.is_mixed ? guess_last(id) : Last{key, false});
}

void Pool::evict(int32_t slot) {
  const int32_t id = large_of(slot);
  // The page that gave an evictable large page its place: that was the last to go, or, by worth,
  // one that goes before it.
  if (larges_[id].run && pages_[slot].key == larges_[id].key) evictable_.remove(id);
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
  cached_[large.group()].push(slot);
}

void Pool::uncache(int32_t slot) {
  LargeRecord& large = larges_[large_of(slot)];
  --large.cached;
  --cached_pages_[large.group()];
  cached_[large.group()].remove(slot);
}

void Pool::make_empty(int32_t id, const int32_t* slots, size_t count) {
  LargeRecord& large = larges_[id];
  if (!large.room && !rooms_.is_live(large.owner)) large.owner = kShared;
  if (large.owner == kShared) rooms_.unlist(id);
  for (size_t i = 0; i < count; ++i) {
    const int32_t index = slots[i] - first_slot(id);
    masks_[size_t(id) * words_ + index / 64] |= uint64_t(1) << index % 64;
  }
  large.room += int32_t(count);
  if (large.used || large.cached) rooms_.list(id);
}

// --------------------------------------------------------- states of large pages

void Pool::use(int32_t id, int32_t count) {
  LargeRecord& large = larges_[id];
  if (large.used) {
    supply_.use(large.group(), count);
  } else {
    supply_.begin_use(large.group(), count);
    unwritten_[large.group()] += per_large(large.group()) - large.written;
    if (large.run) evictable_.remove(id);
    if (large.cached) bring_back(id);
  }
  large.used += count;
}

// Its cached pages lie beside used ones from now on.
void Pool::bring_back(int32_t id) {
  CachedPages& cached = cached_[larges_[id].group()];
  if (!cached.has_aside()) return;
  const int32_t first = first_slot(id), end = first + per_large(larges_[id].group());
  for (int32_t slot = first; slot < end; ++slot) cached.bring_back(slot);
}

void Pool::unuse(int32_t id) {
  LargeRecord& large = larges_[id];
  const int32_t group = large.group();
  const bool was_sparse = is_sparse(id);
  if (--large.used) {
    if (!was_sparse && is_sparse(id)) ++thinned_[group];
    supply_.unuse(group);
  } else {
    supply_.end_use(group);
    unwritten_[group] -= per_large(group) - large.written;
  }
}

// After a page of it lost its use or its cached content.
void Pool::settle(int32_t id) {
  LargeRecord& large = larges_[id];
  if (large.used) return;
  if (large.cached) {
    if (!large.run) make_evictable(id, guess_last(id));
    return;
  }
  give_back(id);
}

void Pool::make_evictable(int32_t id, const Last& last) {
  larges_[id].key = last.key;
  larges_[id].is_mixed = last.is_mixed;
  unsettle(id);
  evictable_.push(id);
}

// It is in no group any more.
void Pool::give_back(int32_t id) {
  LargeRecord& large = larges_[id];
  rooms_.unlist(id);
  uint64_t* words = &masks_[size_t(id) * words_];
  std::fill(words, words + words_, 0);
  --claimed_[large.group()];
  large = LargeRecord{};
  empties_.give_back(id);
}

Pool::Last Pool::last_of(int32_t id) const {
  const Last last = guess_last(id);
  return last.is_mixed ? Last{last_by_worth(id), true} : last;
}

Pool::Last Pool::guess_last(int32_t id) const {
  constexpr int32_t kNoClass = -1;
  const int32_t first = first_slot(id), end = first + per_large(larges_[id].group());
  Key key;
  int32_t number = kNoClass;  // of those that are worth something
  bool is_mixed = false;
  for (int32_t slot = first; slot < end; ++slot) {
    const PageRecord& page = pages_[slot];
    if (!page.cached()) continue;
    if (key < page.key) key = page.key;
    if (rank_of(page.key) != kNormal) continue;
    is_mixed |= number != kNoClass && number != class_of(page.key);
    number = class_of(page.key);
  }
  // Within a class, and by age alone, the order of keys is that of places, whatever the time.
  return {key, is_mixed};
}

Key Pool::last_by_worth(int32_t id) const {
  const int32_t first = first_slot(id), end = first + per_large(larges_[id].group());
  Key key;
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
  for (;;) {
    const int32_t id = evictable_.top().id();
    if (!larges_[id].is_mixed || settled_ == std::make_pair(id, rule_.epoch())) break;
    const Last last = last_of(id);
    if (last.key == larges_[id].key) {
      settled_ = {id, rule_.epoch()};
      break;
    }
    evictable_.remove(id);  // another of its pages is the last to go
    make_evictable(id, last);
  }
  return &evictable_.top();
}

const Entry* Pool::oldest_page(int32_t group, bool in_use) {
  if (!in_use) return cached_[group].oldest();
  if (per_large(group) == 1) return nullptr;
  return cached_[group].oldest_beside(
      [this](int32_t slot) { return larges_[large_of(slot)].used != 0; },
      [this](int32_t slot) { larges_.fetch(large_of(slot)); });
}

}  // namespace kvell::memory
