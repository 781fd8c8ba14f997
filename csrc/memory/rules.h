// What each kind of layer group asks of the core: plain numbers in, token counts out.
// The same functions as prefix/groups/policies.py.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace kvell::memory {

inline int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// In the order of KINDS in compiled.py.
enum class Kind : int32_t { kFull, kSliding, kChunked, kState, kCross, kVision, kDropping };

struct Rules {
  int32_t page_tokens;
  int32_t pages_per_large;
  Kind kind;
  int64_t window_tokens;  // sliding: counts the token itself; chunked: the chunk's length;
                          // dropping: tokens of the prompt that are kept
  int32_t slices;         // pages of one state
  bool required_for_hit;
  bool counts_images;     // pages hold image tokens beside those of the text
  bool holds_embeddings;  // whole images get pages at once
  int64_t page_bytes;     // with its padding
  int64_t worth_tokens;   // a state that saves so many tokens may displace cached pages

  bool is_window() const { return kind == Kind::kSliding || kind == Kind::kChunked; }
  // Is page i the one of tokens i × page_tokens … of the text?
  bool counts_tokens() const {
    return kind != Kind::kState && kind != Kind::kCross && kind != Kind::kVision;
  }

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
  // First token that stays active: what a later step may read, and what the last one did.
  int64_t kept_start(int64_t tokens) const {
    return kind == Kind::kSliding ? std::max<int64_t>(0, tokens - window_tokens)
                                  : active_start(tokens);
  }
  // Most tokens that stay active between steps on the way to so many.
  int64_t most_kept_tokens(int64_t tokens) const {
    switch (kind) {
      case Kind::kSliding:
        return std::min(tokens, window_tokens);
      case Kind::kChunked:
        return std::min(tokens, window_tokens - 1);
      default:
        return tokens;
    }
  }

  // Fewest computed tokens at which page `position` of a window is wholly behind: the
  // inverse of kept_start, so that a step knows at once that nothing has to be done.
  int64_t behind_at(int64_t position) const {
    const int64_t end = (position + 1) * page_tokens;
    if (kind == Kind::kSliding) return end + window_tokens;
    return ceil_div(end, window_tokens) * window_tokens;
  }
};

using Groups = std::vector<Rules>;
using Counts = std::vector<int64_t>;  // one number per group

// The groups of one model, by index, and what follows from them.
struct Model {
  std::vector<int32_t> own;
  std::vector<int32_t> page_sizes;  // of token groups, each once
  int64_t alignment = 1;            // tokens after which pages of all token groups end
  int64_t hit_alignment = 1;        // … of those that a hit requires
  int64_t full_alignment = 0;       // … of full attention; 0: it has none
  int64_t waypoint_tokens = 0;  // from the prompt's end to the last waypoint; 0: none
  bool waypoints_overlap = false;  // they take more than a fourth of the tokens between them
  int64_t waypoint_from = 0;    // prompts shorter than that have none
  int64_t renew_steps = 16;     // between renewals of what one resumes from
  bool has_states = false, has_windows = false, has_cross = false, has_embeddings = false, has_dropping = false,
       counts_images = false;
};

// How a pool is shared out (Layout in pages/layout.py).
struct Sharing {
  int64_t large_page_bytes = 0;
  bool literal_order = false;  // every holder gets large pages of its own first
  Counts quotas;               // large pages each group may take; empty: any
};

}  // namespace kvell::memory
