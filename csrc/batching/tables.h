// Which logical page holds which position, by holder and group, and what a step's kernels are told
// of them: the same as PageTables and WorkRows of engine/running/batching.py, for any number of requests
// in one pass over flat numbers.
#pragma once
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "memory/facts.h"
#include "memory/rules.h"

namespace kvell::batching {

using memory::Ints;
using Longs = std::vector<int64_t>;

struct UnknownHandle {
  int64_t handle;
};

// Requests of a step: whose they are, where each starts and how many tokens it computes.
struct Work {
  Longs handles, starts, counts;

  size_t size() const { return handles.size(); }
};

struct Group {
  memory::Rules rules;

  int64_t first_page(int64_t start, int64_t away) const {
    return std::max(rules.active_start(start), away) / rules.page_tokens;
  }
  int64_t pages_of(int64_t tokens) const { return memory::ceil_div(tokens, rules.page_tokens); }
};

class PageTables {
 public:
  explicit PageTables(std::vector<Group> groups) : groups_(std::move(groups)) {}

  void forget(int64_t handle) { held_.erase(handle); }

  // Rows of (handle, group, position, page).
  void put(Ints rows) {
    for (const int32_t* row = rows.data; row < rows.data + rows.size; row += 4) {
      if (row[1] < 0 || row[1] >= int32_t(groups_.size()) || row[2] < 0)
        throw std::invalid_argument("new_pages: no such group or position");
      auto& tables = held_[row[0]];
      if (tables.empty()) tables.resize(groups_.size());
      auto& table = tables[row[1]];
      if (int64_t(table.size()) <= row[2]) table.resize(size_t(row[2]) + 1, kNoPage);
      table[row[2]] = row[3];
    }
  }

  const std::vector<int32_t>& pages(int64_t handle, int64_t group) const {
    const auto found = held_.find(handle);
    if (found == held_.end()) throw UnknownHandle{handle};
    return found->second.at(size_t(group));
  }

  // One after the other: query_starts [n+1], context_lens [n], table_starts [n+1], page_ids [Σ],
  // first_positions [n], write_page_ids [T], write_offsets [T].
  // away: of each request the tokens before which tables hold nothing; empty: of none.
  std::vector<int32_t> arrays(int64_t index, const Work& work, const Longs& away) const;

  // Of a group of states: query_starts [n+1], starts [n], page_ids [n × slices].
  std::vector<int32_t> states(int64_t index, const Work& work, int64_t slices) const;

 private:
  static constexpr int32_t kNoPage = -1;

  std::vector<Group> groups_;
  std::unordered_map<int64_t, std::vector<std::vector<int32_t>>> held_;
};

// One after the other: token ids [T], their positions [T], rows whose logits are wanted [R].
// logits: how many of each request's tokens, the last ones.
Longs token_rows(const Longs& starts, const Longs& counts, const Longs& logits,
                 const std::vector<Ints>& token_ids);

}  // namespace kvell::batching
