// Large pages that are in no group: those to be had, the lowest first, and those that are somebody
// else's for a while.
#pragma once
#include "idset.h"

namespace kvell::memory {

class EmptyLarges {
 public:
  explicit EmptyLarges(int32_t count) : count_(count), returned_(count), withheld_(count) {}

  // Takes the lowest; -1 if there is none.
  int32_t take() {
    if (!returned_.empty()) {
      const int64_t id = returned_.lowest();
      returned_.erase(id);
      return int32_t(id);
    }
    while (next_fresh_ < count_)
      if (const int32_t id = next_fresh_++; !withheld_[id]) return id;
    return -1;
  }
  void give_back(int32_t id) { returned_.insert(id); }

  bool is_withheld(int32_t id) const { return withheld_[id]; }
  int64_t num_withheld() const { return num_withheld_; }
  // One of them is not to be had; it is again.
  void withhold(int32_t id) {
    withheld_[id] = true;
    returned_.erase(id);
    ++num_withheld_;
  }
  void restore(int32_t id) {
    withheld_[id] = false;
    --num_withheld_;
    if (id < next_fresh_) returned_.insert(id);
  }

  int32_t num_touched() const { return next_fresh_; }  // the rest was never taken

 private:
  const int32_t count_;
  IdSet returned_;  // to be had again
  std::vector<bool> withheld_;
  int64_t num_withheld_ = 0;
  int32_t next_fresh_ = 0;  // from here on they were never taken
};

}  // namespace kvell::memory
