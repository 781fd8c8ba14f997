// What each kind of layer group asks of the core: plain numbers in, token counts out.
// The same functions as prefix/policies.py and prefix/needs.py; a new kind of group
// (state, image) is a new case here and nowhere else.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace kvell::memory {

inline int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

enum class Kind : int32_t { kFull, kSliding, kChunked };  // the order of KINDS in compiled.py

struct Rules {
  int32_t page_tokens;
  int32_t pages_per_large;
  Kind kind;
  int64_t window_tokens;  // sliding: counts the token itself; chunked: the chunk's length
  bool required_for_hit = true;

  // First token that a later step may still read once so many are computed.
  int64_t active_start(int64_t tokens) const {
    switch (kind) {
      case Kind::kSliding:
        return std::max<int64_t>(0, tokens - (window_tokens - 1));
      case Kind::kChunked:
        return tokens / window_tokens * window_tokens;
      default:
        return 0;
    }
  }
  // Most tokens kept between steps on the way to so many.
  int64_t most_live_tokens(int64_t tokens) const {
    return kind == Kind::kFull ? tokens : std::min(tokens, window_tokens - 1);
  }
  // Eviction rank among pages of one age: the longest goes first.
  int64_t prefix_length(int64_t page_end_tokens) const { return page_end_tokens; }

  // Fewest computed tokens at which page `position` is wholly behind: the inverse
  // of active_start, so that a step knows at once that nothing has to be done.
  int64_t behind_at(int64_t position) const {
    const int64_t end = (position + 1) * page_tokens;
    switch (kind) {
      case Kind::kSliding:
        return end + window_tokens - 1;
      case Kind::kChunked:
        return ceil_div(end, window_tokens) * window_tokens;
      default:
        return std::numeric_limits<int64_t>::max();
    }
  }

  int64_t peak_pages(int64_t until, int64_t chunk, int64_t computed) const {
    const int64_t whole = ceil_div(until, page_tokens) - active_start(computed) / page_tokens;
    const int64_t live = most_live_tokens(until);
    if (live >= until) return whole;
    return std::min(whole, ceil_div(live + chunk - 1, page_tokens) + 1);
  }
  int64_t demand_pages(int64_t expected, int64_t held_end, int64_t need) const {
    const int64_t rest = ceil_div(expected, page_tokens) - held_end;
    const int64_t live = ceil_div(most_live_tokens(expected), page_tokens) + 1;
    return std::max(need, std::min(rest, live));
  }

  int64_t first_hit_page(int64_t length) const { return active_start(length) / page_tokens; }
};

using Groups = std::vector<Rules>;
using Counts = std::vector<int64_t>;  // one number per group

// How a pool is shared out (Layout in pages/layout.py).
struct Sharing {
  bool literal_order = false;  // every holder gets large pages of its own first
  Counts quotas;               // large pages each group may take; empty: any
};

}  // namespace kvell::memory
