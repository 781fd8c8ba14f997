// What an access makes of a page's place in the eviction order (prefix/evictor.py). Another
// rule is another struct with this function; pool, heaps and placer only compare keys.
#pragma once
#include "records.h"

namespace kvell::memory {

constexpr int64_t kSpare = 0, kCoarse = 1, kNormal = 2;

struct LeastRecentlyUsed {
  Key key(int64_t rank, int64_t time, int64_t prefix_length) const {
    return make_key(make_stamp(rank, time), prefix_length);
  }
};

using EvictionRule = LeastRecentlyUsed;

}  // namespace kvell::memory
