// The longest prefix that every group can resume from (prefix/hits.py).
#pragma once
#include "radix.h"

namespace kvell::memory {

// Hits end on whole pages of every group.
int64_t alignment_tokens(const Groups& groups);

// Longest resumable length ≤ limit; `runs` is scratch that keeps its memory.
int64_t longest_hit(const Groups& groups, const Path& path, int64_t limit_tokens,
                    std::vector<std::vector<int32_t>>& runs);

}  // namespace kvell::memory
