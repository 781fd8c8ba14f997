// What could be handed out now, and whether a demand fits into it (tests/oracle/pages/demand.py): large pages
// without a used page can go to any group, the other pages of those with one only to their own.
#pragma once
#include "rules.h"

namespace kvell::memory {

class Supply {
 public:
  // `quotas`: large pages that each group may take; empty: any.
  Supply(const Groups& groups, int64_t num_large, const Counts& quotas);
  void add_groups();

  int64_t whole() const { return whole_; }  // large pages without a used page
  // Per group, pages not used in large pages with a used one; and these large pages.
  const Counts& partial() const { return partial_; }
  const Counts& in_use() const { return in_use_; }
  bool has_shares() const { return !quotas_.empty(); }
  bool is_share_claimed(int32_t group, int64_t claimed) const {
    return has_shares() && claimed >= quotas_[group];
  }

  bool feasible(const Counts& need) const;
  // Large pages too few for what is needed, in a pool without shares; ≤ 0 if there are enough.
  int64_t shortage(const Counts& need) const;
  // May the group take a whole large page without failing what the call still needs?
  bool may_take_whole(int32_t group, const Counts& left) const;

  // So many pages of a large page are used: the first of it; more of it.
  void begin_use(int32_t group, int32_t count) {
    --whole_;
    ++in_use_[group];
    partial_[group] += per_large(group) - count;
  }
  void use(int32_t group, int32_t count) { partial_[group] -= count; }
  // A page of a large page is used no longer: one of several; the last of it.
  void unuse(int32_t group) { ++partial_[group]; }
  void end_use(int32_t group) {
    partial_[group] -= per_large(group) - 1;
    --in_use_[group];
    ++whole_;
  }
  // Of large pages in no group.
  void withhold() { --whole_; }
  void restore() { ++whole_; }

 private:
  int64_t per_large(size_t group) const { return groups_[group].pages_per_large; }

  const Groups& groups_;
  const Counts quotas_;
  int64_t whole_;
  Counts partial_, in_use_;
};

}  // namespace kvell::memory
