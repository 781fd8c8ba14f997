#include "hits.h"

#include <numeric>

namespace kvell::memory {
namespace {

// For each position, how many consecutive pages up to and with it are found.
void count_runs(const std::vector<int32_t>& found, std::vector<int32_t>& runs) {
  runs.resize(found.size());
  int32_t run = 0;
  for (size_t i = 0; i < found.size(); ++i) runs[i] = run = found[i] == kNoPage ? 0 : run + 1;
}

bool resumes(const Rules& group, const std::vector<int32_t>& runs, int64_t length) {
  const int64_t stop = length / group.page_tokens;
  const int64_t needed = stop - group.first_hit_page(length);
  return !group.required_for_hit || needed <= 0 || runs[stop - 1] >= needed;
}

}  // namespace

int64_t alignment_tokens(const Groups& groups) {
  int64_t step = 1;
  for (const Rules& group : groups) step = std::lcm<int64_t>(step, group.page_tokens);
  return step;
}

int64_t longest_hit(const Groups& groups, const Path& path, int64_t limit_tokens,
                    std::vector<std::vector<int32_t>>& runs) {
  const int64_t step = alignment_tokens(groups);
  runs.resize(groups.size());
  for (size_t g = 0; g < groups.size(); ++g) count_runs(path.found[g], runs[g]);
  for (int64_t length = limit_tokens / step * step; length > 0; length -= step) {
    bool all = true;
    for (size_t g = 0; all && g < groups.size(); ++g) all = resumes(groups[g], runs[g], length);
    if (all) return length;
  }
  return 0;
}

}  // namespace kvell::memory
