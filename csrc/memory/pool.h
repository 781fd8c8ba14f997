// Large pages carved into small ones: who uses, who keeps, what is empty, what goes
// first. The state machine is drawn in tests/oracle/pages/pool.py; decisions equal its, to the id.
#pragma once
#include "cached.h"
#include "empties.h"
#include "rooms.h"
#include "supply.h"

namespace kvell::memory {

struct Division {  // of the pool; pages of each group
  int64_t empty_large;
  Counts used, cached;
  Counts unwritten, stranded;  // in large pages with a used page: never written; else not used
};

class Pool {
 public:
  // `quotas`: large pages that each group may take; empty: any.
  Pool(const Groups& groups, int32_t num_large, const Counts& quotas, const EvictionRule& rule);

  // Before groups are added: may there be pages of theirs in this pool?
  void check_size(const Groups& more) const;
  // Serves the groups that were added; true if the slots have new numbers: see renamed.
  bool add_groups();
  // The number of a slot from before the last add_groups.
  int32_t renamed(int32_t slot) const {
    return (slot >> old_shift_) << shift_ | (slot & ((1 << old_shift_) - 1));
  }

  // ---- slots and page ids
  int32_t large_of(int32_t slot) const { return slot >> shift_; }
  int32_t page_of(int32_t group, int32_t slot) const {
    return large_of(slot) * per_large(group) + (slot & ((1 << shift_) - 1));
  }

  // ---- what there is
  const Supply& supply() const { return supply_; }
  int64_t num_empty() const;
  Division division() const;
  // How often anything became to be had; each time a shortage may be less by one, never by more.
  int64_t freed() const { return freed_; }
  // Are there few large pages without a used page?
  bool is_scarce() const { return supply_.whole() * kScarce < num_large_; }
  // Is at most one page in kSparse of the large page used?
  bool is_sparse(int32_t id) const {
    return larges_[id].used * kSparse <= per_large(larges_[id].group());
  }
  // How often one of the group's pages in use came to lie in a sparse large page, or had a single
  // user left there.
  int64_t thinned(int32_t group) const { return thinned_[group]; }
  // Is each page of the group a large page?
  bool is_alone(int32_t group) const { return cached_[group].is_alone(); }

  // ---- association of holders
  Rooms& rooms() { return rooms_; }
  const Rooms& rooms() const { return rooms_; }
  int32_t claim_large(int32_t group, int32_t holder);
  // Claims a large page that is one page, and uses it; its slot, or -1.
  int32_t take_alone(int32_t group, int32_t holder);

  // ---- memory that others have
  const EmptyLarges& empties() const { return empties_; }
  // An empty large page is not to be had until it is restored.
  void withhold(int32_t id);
  void restore(int32_t id);

  // ---- small pages
  // Uses up to `count` of the lowest empty pages of a large page.
  void take(int32_t large, int64_t count, std::vector<int32_t>& out);
  void acquire(int32_t slot);
  // The page's records are wanted soon.
  void fetch(int32_t slot) const {
    pages_.fetch(slot);
    larges_.fetch(large_of(slot));
  }
  void release(int32_t slot);
  void release(int32_t slot, const Key& renewed);
  // What acquire and release would do to a named page, where it lies.
  void renew(int32_t slot, const Key& key);
  void index(int32_t slot, const Key& key) { pages_[slot].key = key; }
  const Key& key_of(int32_t slot) const { return pages_[slot].key; }  // while it is named
  void evict(int32_t slot);
  // Cached pages of one large page that has a used page too.
  void evict_beside(const std::vector<int32_t>& slots);

  // ---- who goes first
  // Cached page, with `in_use` in a large page with a used page; never a whole large page.
  const Entry* oldest_page(int32_t group, bool in_use);
  // Of its cached pages the last to go.
  Key youngest(int32_t id) const { return last_of(id).key; }
  const Entry* oldest_large();
  Place place(const Key& key) const { return rule_.place(key); }
  int64_t age(const Key& key) const { return rule_.age(key); }
  // Gives an evictable large page back; nothing names its pages any more.
  void empty_large(int32_t large);

  PageRecord& page(int32_t slot) { return pages_[slot]; }
  const LargeRecord& large(int32_t id) const { return larges_[id]; }
  int32_t num_large() const { return num_large_; }
  int32_t per_large(int32_t group) const { return groups_[group].pages_per_large; }
  int32_t first_slot(int32_t large) const { return large << shift_; }
  uint64_t mask_word(int32_t large, int32_t word) const {
    return masks_[size_t(large) * words_ + word];
  }
  int32_t mask_words() const { return words_; }

 private:
  static constexpr int64_t kScarce = 8;  // SCARCE in tests/oracle/placement/placement.py
  static constexpr int32_t kSparse = 2;  // SPARSE in tests/oracle/placement/compaction.py

  void add_lists();
  void rename_slots(int32_t shift);
  void widen_masks(int32_t words);
  void use(int32_t id, int32_t count);
  void bring_back(int32_t id);
  void unuse(int32_t id);
  void settle(int32_t id);
  struct Last {
    Key key;
    bool is_mixed;  // there are others of other classes
  };
  Last last_of(int32_t id) const;
  // Of pages of several classes one that goes no later than the last: it counts until its turn
  // has come, and most often it is used again before.
  Last guess_last(int32_t id) const;
  Key last_by_worth(int32_t id) const;
  void make_evictable(int32_t id, const Last& last);
  void unsettle(int32_t id) {
    if (settled_.first == id) settled_.first = kNoLarge;
  }
  void give_back(int32_t id);
  void make_empty(int32_t id, const int32_t* slots, size_t count);
  void cache(int32_t slot);
  void uncache(int32_t slot);

  const Groups& groups_;
  const EvictionRule& rule_;
  const int32_t num_large_;
  int32_t shift_ = 0, old_shift_ = 0, words_ = 1;
  ZeroArray<PageRecord> pages_;
  ZeroArray<LargeRecord> larges_;
  ZeroArray<uint64_t> masks_;  // empty pages of large pages that are in a group
  Supply supply_;
  Rooms rooms_;
  std::vector<CachedPages> cached_;  // by group
  ClassQueue<LargeRecord> evictable_;  // by their youngest page, or one that goes before it
  // Of many classes, and known to go first in this epoch of the rule.
  static constexpr int32_t kNoLarge = -1;
  std::pair<int32_t, int64_t> settled_{kNoLarge, 0};
  EmptyLarges empties_;
  int64_t freed_ = 0;
  Counts claimed_;  // per group, large pages in it
  Counts cached_pages_;
  Counts unwritten_;  // pages of large pages with a used page
  Counts thinned_;
};

}  // namespace kvell::memory
