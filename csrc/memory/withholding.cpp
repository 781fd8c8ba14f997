#include "withholding.h"

#include <limits>
#include <stdexcept>
#include <unordered_set>

namespace kvell::memory {
namespace {

constexpr int64_t kWithheld = 0, kEmpty = 1, kCached = 2;  // prefix/interface.py
constexpr int kOrderRankShift = 40;

}  // namespace

std::vector<int64_t> Withholder::reclaim_order() const {
  const Pool& pool = store_.pool;
  std::vector<int64_t> order(pool.num_large());
  for (int32_t id = 0; id < pool.num_large(); ++id) {
    const LargeRecord& large = pool.large(id);
    if (large.used) {
      order[id] = std::numeric_limits<int64_t>::max();
    } else if (large.cached) {
      const Key key = pool.youngest(id);
      order[id] = kCached + (rank_of(key) << kOrderRankShift) + time_of(key);
    } else {
      order[id] = pool.empties().is_withheld(id) ? kWithheld : kEmpty;
    }
  }
  return order;
}

void Withholder::check(Ints larges) const {
  std::unordered_set<int32_t> seen;
  const int32_t count = store_.pool.num_large();
  for (int64_t i = 0; i < larges.size; ++i) {
    if (larges[i] < 0 || larges[i] >= count)
      throw std::invalid_argument("there is no such large page: they are 0 to " +
                                  std::to_string(count - 1));
    if (!seen.insert(larges[i]).second)
      throw std::invalid_argument("a large page is named twice");
  }
}

void Withholder::withhold(Ints larges) {
  Pool& pool = store_.pool;
  check(larges);
  if (pool.supply().has_shares())
    throw std::invalid_argument("the pool was cut into shares at start: there is none to give");
  for (int64_t i = 0; i < larges.size; ++i)
    if (pool.large(larges[i]).used || pool.empties().is_withheld(larges[i]))
      throw std::invalid_argument("large page " + std::to_string(larges[i]) +
                                  " is not available");
  for (int64_t i = 0; i < larges.size; ++i) {
    if (pool.large(larges[i]).cached) store_.placer.evict_large(larges[i]);
    pool.withhold(larges[i]);
  }
}

void Withholder::restore(Ints larges) {
  Pool& pool = store_.pool;
  check(larges);
  for (int64_t i = 0; i < larges.size; ++i)
    if (!pool.empties().is_withheld(larges[i]))
      throw std::invalid_argument("large page " + std::to_string(larges[i]) +
                                  " is not withheld");
  for (int64_t i = 0; i < larges.size; ++i) pool.restore(larges[i]);
}

}  // namespace kvell::memory
