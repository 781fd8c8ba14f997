// The whole state as plain Python data: what audits read and tests compare.
#pragma once
#include <nanobind/nanobind.h>

#include "core.h"

namespace kvell::memory {

// Empty large pages; per group used, cached and evicted pages; hit tokens; rungs.
nanobind::tuple totals_of(Core& core);

// Pages evicted so far, by group.
nanobind::tuple evicted_of(Core& core);

// What each entry is: see CompiledCore.snapshot in prefix/core/compiled.py.
nanobind::tuple state_of(Core& core);

}  // namespace kvell::memory
