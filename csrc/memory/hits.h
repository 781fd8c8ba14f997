// The longest prefix that every group can resume from (tests/oracle/index/hits.py).
#pragma once
#include "needs.h"
#include "radix.h"

namespace kvell::memory {

class Hits {
 public:
  explicit Hits(const Groups& groups) : groups_(groups) {}

  // Looks at what was found along a path; everything else is asked of that.
  void read(const Model& model, const Path& path, const Facts& facts);

  // Longest resumable length ≤ limit.
  int64_t longest(int64_t limit_tokens);
  // Is everything there that the group needs to go on after so many tokens?
  bool resumes(int32_t group, int64_t length) const;
  // A page whose first tokens are the prefix's last ones, which fill it in part; or kNoPage.
  int32_t tail_page(int32_t group, int64_t length) const;
  // The page at a place that is not a whole page of tokens; or kNoPage.
  int32_t page_at(int32_t group, int64_t end, int64_t part) const;
  // Whole pages from the first on without a hole, within so many tokens.
  int64_t whole_run(int32_t group, int64_t length) const {
    return std::min(scans_[group].first_hole, length / groups_[group].page_tokens);
  }

 private:
  struct Scan {
    int64_t first_hole;         // position of the first page that is not there
    std::vector<int32_t> runs;  // of windows: pages in a row up to and with each position
    int64_t images_to;          // of cross groups: prefixes below this have their images
  };

  void scan(int32_t group);
  bool all_resume(int64_t length) const;
  int64_t longest_state(int32_t group, int64_t limit) const;
  int64_t longest_tokens(int64_t limit);
  void collect_lengths(int64_t limit);
  const Found& found(int32_t group) const { return path_->found[group]; }

  const Groups& groups_;
  const Model* model_ = nullptr;
  const Path* path_ = nullptr;
  const Facts* facts_ = nullptr;
  std::vector<Scan> scans_;       // per group
  std::vector<int32_t> lengths_;  // to try, beside those where pages end in every group
};

}  // namespace kvell::memory
