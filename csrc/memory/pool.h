// Large pages carved into small ones: who uses, who keeps, what is empty, what goes
// first. The state machine is drawn in pages/pool.py; decisions equal its, to the id.
#pragma once
#include "classes.h"
#include "handles.h"
#include "idset.h"
#include "rules.h"

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
  int64_t whole() const { return whole_; }
  const Counts& partial() const { return partial_; }
  Division division() const;
  bool feasible(const Counts& need) const;
  // Large pages too few for what is needed, in a pool without shares; ≤ 0 if there are enough.
  int64_t shortage(const Counts& need) const;
  // How often anything became to be had; each time a shortage may be less by one, never by more.
  int64_t freed() const { return freed_; }
  // May the group take a whole large page without failing what the call still needs?
  bool may_take_whole(int32_t group, const Counts& left) const;
  // Are there few large pages without a used page?
  bool is_scarce() const { return whole_ * kScarce < num_large_; }
  bool has_shares() const { return !quotas_.empty(); }
  // Is at most one page in kSparse of the large page used?
  bool is_sparse(int32_t id) const {
    return larges_[id].used * kSparse <= per_large(larges_[id].group());
  }
  // How often one of the group's pages in use came to lie in a sparse large page, or had a single
  // user left there.
  int64_t thinned(int32_t group) const { return thinned_[group]; }
  // Are pages of the group large pages? Those of them that are cached are in no queue: whoever
  // may have a page of the group may have a large page, and finds it among these.
  bool is_alone(int32_t group) const { return per_large(group) == 1 && !has_shares(); }

  // ---- association of holders
  void open_holder(int32_t holder) { live_.insert(holder, true); }
  void close_holder(int32_t holder);
  // The picks: a large page with an empty page, or -1. With `in_use` it has a used page too.
  int32_t own_large(int32_t group, int32_t holder, bool in_use) const;
  int32_t shared_large(int32_t group, int64_t want, bool in_use) const;
  int32_t others_large(int32_t group, bool in_use) const;
  int32_t claim_large(int32_t group, int32_t holder);
  // Claims a large page that is one page, and uses it; its slot, or -1.
  int32_t take_alone(int32_t group, int32_t holder);

  // ---- memory that others have
  bool is_withheld(int32_t id) const { return withheld_[id]; }
  int64_t num_withheld() const { return num_withheld_; }
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
  Key youngest(int32_t id) const;  // if evictable: of its pages the last to go
  const Entry* oldest_large();
  Place place(const Key& key) const { return rule_.place(key); }
  // Gives an evictable large page back; nothing names its pages any more.
  void empty_large(int32_t large);

  PageRecord& page(int32_t slot) { return pages_[slot]; }
  const LargeRecord& large(int32_t id) const { return larges_[id]; }
  int32_t num_large() const { return num_large_; }
  int32_t num_touched() const { return next_fresh_; }  // the rest was never claimed
  int32_t per_large(int32_t group) const { return groups_[group].pages_per_large; }
  int32_t first_slot(int32_t large) const { return large << shift_; }
  uint64_t mask_word(int32_t large, int32_t word) const {
    return masks_[size_t(large) * words_ + word];
  }
  int32_t mask_words() const { return words_; }

 private:
  static constexpr uint32_t kAside = uint32_t(1) << 31;
  static constexpr uint32_t kAlone = uint32_t(1) << 30;  // instead of a run: see is_alone
  static constexpr int64_t kScarce = 8;  // SCARCE in prefix/placement.py
  static constexpr int32_t kSparse = 2;  // SPARSE in prefix/compaction.py
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

  struct GroupLists {
    GroupLists(ZeroArray<PageRecord>& pages, int64_t rooms, const EvictionRule& rule)
        : shared(rooms), cached(pages, rule), aside(pages, rule) {}
    // Large pages with an empty page.
    IdSet shared;              // by room: see by_room
    std::vector<uint64_t> owned;  // in order of by_owner: few, and looked at most often
    ClassQueue<PageRecord> cached;
    // Cached pages of large pages without a used page, met while only others were wanted;
    // they come back when their large page is used again.
    ClassQueue<PageRecord, kAside> aside;
  };

  void add_lists();
  using Owned = std::vector<uint64_t>;
  static Owned::const_iterator first_of(const Owned& owned, uint64_t entry) {
    return std::lower_bound(owned.begin(), owned.end(), entry);
  }
  bool usable(int32_t id, bool in_use) const { return !in_use || larges_[id].used; }
  void rename_slots(int32_t shift);
  void widen_masks(int32_t words);
  int32_t next_empty();
  void list(int32_t id);
  void unlist(int32_t id);
  void use(int32_t id, int32_t count);
  void bring_back(int32_t id);
  void unuse(int32_t id);
  void settle(int32_t id);
  void make_evictable(int32_t id, const Key& youngest);
  void give_back(int32_t id);
  void make_empty(int32_t id, const int32_t* slots, size_t count);
  void cache(int32_t slot);
  void uncache(int32_t slot);

  const Groups& groups_;
  const EvictionRule& rule_;
  const int32_t num_large_;
  const int32_t large_bits_;  // of the id of a large page
  int32_t shift_ = 0, old_shift_ = 0, words_ = 1;
  ZeroArray<PageRecord> pages_;
  ZeroArray<LargeRecord> larges_;
  ZeroArray<uint64_t> masks_;  // empty pages of large pages that are in a group
  std::vector<GroupLists> lists_;
  ClassQueue<LargeRecord> evictable_;  // by their youngest page, or one that goes before it
  IdSet returned_;  // large pages that are to be had again
  std::vector<bool> withheld_;
  int64_t num_withheld_ = 0;
  int32_t next_fresh_ = 0;  // large pages from here on were never claimed
  int64_t whole_;
  int64_t freed_ = 0;
  Counts partial_;
  const Counts quotas_;
  Counts claimed_;  // per group, large pages in it
  Counts in_use_;   // of these, with a used page
  Counts cached_pages_;
  Counts unwritten_;  // pages of large pages with a used page
  Counts thinned_;
  HandleMap<bool> live_;  // holders, and keepers
};

}  // namespace kvell::memory
