// The whole state as plain Python data: what audits read and tests compare.
#pragma once
#include <nanobind/nanobind.h>

#include <vector>

#include "core.h"

namespace kvell::memory {

// Empty large pages; per group used, cached and evicted pages; hit tokens; rungs.
nanobind::tuple totals_of(Core& core);

// Pages evicted so far, by group.
nanobind::tuple evicted_of(Core& core);

// Rows of four for every large page: group, or -1, or -2 where it is withheld; small pages used and
// cached; step of the one that goes last, where some are cached and none is used; else -1.
std::vector<int64_t> large_rows(Core& core);

// Rows of four for every small page of a large page that is in a group: page, users, length of the
// prefix that it ends and step of its last access, or -1 where the index does not name it.
std::vector<int64_t> small_rows(Core& core, int32_t large);

// What each entry is: see CompiledCore.snapshot in prefix/core/compiled.py.
nanobind::tuple state_of(Core& core);

}  // namespace kvell::memory
