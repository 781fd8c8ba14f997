// Large pages that are somebody else's for a while (tests/oracle/placement/withholding.py).
#pragma once
#include <vector>

#include "facts.h"
#include "store.h"

namespace kvell::memory {

class Withholder {
 public:
  explicit Withholder(Store& store) : store_(store) {}

  // By large page: see WithholdingCore.reclaim_order.
  std::vector<int64_t> reclaim_order() const;
  void withhold(Ints larges);
  void restore(Ints larges);

 private:
  void check(Ints larges) const;

  Store& store_;
};

}  // namespace kvell::memory
