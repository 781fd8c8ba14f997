// What the index has come to name, or names no longer, for whoever asked to know
// (tests/oracle/index/changes.py).
#pragma once
#include <array>
#include <utility>
#include <vector>

#include "pool.h"

namespace kvell::memory {

using ChangeRows = std::vector<std::array<int32_t, 5>>;  // change, group, page, end, handle or new page

class IndexChanges {
 public:
  explicit IndexChanges(const Pool& pool) : pool_(pool) {}

  void watch() { is_watched_ = true; }
  ChangeRows taken() { return std::exchange(rows_, {}); }

  void named(int32_t handle, int32_t group, int32_t slot, int64_t end) {
    if (is_watched_) add(kNamed, group, slot, end, handle);
  }
  void dropped(int32_t group, int32_t slot, int64_t end) {
    if (is_watched_) add(kDropped, group, slot, end, 0);
  }
  // A named page is another one now.
  void moved(int32_t group, int32_t from, int32_t to, int64_t end) {
    if (is_watched_) add(kMoved, group, from, end, pool_.page_of(group, to));
  }

 private:
  enum Change : int32_t { kNamed, kDropped, kMoved };  // as in prefix/interface.py

  void add(Change change, int32_t group, int32_t slot, int64_t end, int32_t other) {
    rows_.push_back({change, group, pool_.page_of(group, slot), int32_t(end), other});
  }

  const Pool& pool_;
  bool is_watched_ = false;
  ChangeRows rows_;
};

}  // namespace kvell::memory
