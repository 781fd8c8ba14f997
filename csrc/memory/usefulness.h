// Why states are kept, and how many of each sort were used again (tests/oracle/eviction/checkpoints.py).
#pragma once
#include "eviction.h"

namespace kvell::memory {

enum class Sort : int32_t { kFine, kCoarse, kWaypoint, kPromptEnd, kBranch, kTurnEnd };

class Usefulness {
 public:
  // A request resumed from one, for the first time.
  void note_used(Sort sort) { ++counts_[int32_t(sort)].used; }
  // One proved useless, or was kept on trial.
  void note_wasted(Sort sort, int64_t rank) {
    Count& count = counts_[int32_t(sort)];
    if (rank != kNormal || ++count.wasted < kMemory) return;
    count.used /= 2;
    count.wasted /= 2;
  }
  // Eviction rank of a state of this sort.
  int64_t rank(Sort sort) const {
    if (sort == Sort::kFine) return kSpare;
    if (sort == Sort::kCoarse) return kCoarse;
    if (sort == Sort::kWaypoint || sort == Sort::kBranch) return kNormal;
    const Count& count = counts_[int32_t(sort)];
    const int64_t trial = sort == Sort::kTurnEnd ? kTurnTrial : kTrial;
    return count.used * kUsedPart + trial >= count.wasted ? kNormal : kSpare;
  }

 private:
  static constexpr int64_t kUsedPart = 8, kTrial = 64, kTurnTrial = 16, kMemory = 256;
  struct Count {
    int64_t used = 0, wasted = 0;
  };
  Count counts_[6];
};

}  // namespace kvell::memory
