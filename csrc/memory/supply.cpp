#include "supply.h"

#include <numeric>
#include <stdexcept>

namespace kvell::memory {
namespace {

int64_t whole_needed(int64_t need, int64_t partial, int64_t per_large) {
  return need > partial ? ceil_div(need - partial, per_large) : 0;
}

}  // namespace

Supply::Supply(const Groups& groups, int64_t num_large, const Counts& quotas)
    : groups_(groups),
      quotas_(quotas),
      whole_(num_large),
      partial_(groups.size(), 0),
      in_use_(groups.size(), 0) {
  const int64_t shares = std::accumulate(quotas.begin(), quotas.end(), int64_t(0));
  if (shares > num_large)
    throw std::invalid_argument("shares of " + std::to_string(shares) +
                                " large pages in a pool of " + std::to_string(num_large));
}

void Supply::add_groups() {
  partial_.resize(groups_.size(), 0);
  in_use_.resize(groups_.size(), 0);
}

int64_t Supply::shortage(const Counts& need) const {
  int64_t sum = 0;
  for (size_t g = 0; g < need.size(); ++g)
    sum += whole_needed(need[g], partial_[g], per_large(g));
  return sum - whole_;
}

bool Supply::feasible(const Counts& need) const {
  for (size_t g = 0; has_shares() && g < need.size(); ++g)
    if (whole_needed(need[g], partial_[g], per_large(g)) > quotas_[g] - in_use_[g]) return false;
  return shortage(need) <= 0;
}

bool Supply::may_take_whole(int32_t group, const Counts& left) const {
  if (has_shares()) return in_use_[group] < quotas_[group];
  if (left[group] > partial_[group]) return true;
  // No group needs more large pages than pages; most often that is enough to know.
  int64_t most = 0, sum = 0;
  for (size_t g = 0; g < left.size(); ++g) most += std::max<int64_t>(0, left[g] - partial_[g]);
  if (most < whole_) return true;
  for (size_t g = 0; g < left.size(); ++g) sum += whole_needed(left[g], partial_[g], per_large(g));
  return sum < whole_;
}

}  // namespace kvell::memory
