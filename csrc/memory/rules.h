// What each kind of layer group asks of the core: plain numbers in, token counts out.
// The same functions as prefix/policies.py and prefix/needs.py; a new kind of group
// (chunked-local, state, image) is a new case here and nowhere else.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace kvell::memory {

inline int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

struct Rules {
  int32_t page_tokens;
  int32_t pages_per_large;
  int64_t window_tokens;  // counts the token itself; 0: full attention
  bool required_for_hit = true;

  // First token that a later step may still read once so many are computed.
  int64_t active_start(int64_t tokens) const {
    return window_tokens ? std::max<int64_t>(0, tokens - (window_tokens - 1)) : 0;
  }
  // Tokens kept between steps.
  int64_t live_tokens(int64_t tokens) const {
    return window_tokens ? std::min(tokens, window_tokens - 1) : tokens;
  }
  // Eviction rank among pages of one age: the longest goes first.
  int64_t prefix_length(int64_t page_end_tokens) const { return page_end_tokens; }

  // Fewest computed tokens at which page `position` is wholly behind: the inverse
  // of active_start, so that a step knows at once that nothing has to be done.
  int64_t behind_at(int64_t position) const {
    if (!window_tokens) return std::numeric_limits<int64_t>::max();
    return (position + 1) * page_tokens + window_tokens - 1;
  }

  int64_t peak_pages(int64_t until, int64_t chunk) const {
    const int64_t whole = ceil_div(until, page_tokens), live = live_tokens(until);
    if (live >= until) return whole;
    return std::min(whole, ceil_div(live + chunk - 1, page_tokens) + 1);
  }
  int64_t demand_pages(int64_t expected, int64_t held_end, int64_t need) const {
    const int64_t rest = ceil_div(expected, page_tokens) - held_end;
    const int64_t live = ceil_div(live_tokens(expected), page_tokens) + 1;
    return std::max(need, std::min(rest, live));
  }

  int64_t first_hit_page(int64_t length) const { return active_start(length) / page_tokens; }
};

using Groups = std::vector<Rules>;
using Counts = std::vector<int64_t>;  // one number per group

}  // namespace kvell::memory
