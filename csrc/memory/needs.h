// Which page positions of a group a request needs, and how many pages at its worst
// (prefix/groups/needs.py).
#pragma once
#include "facts.h"
#include "rules.h"

namespace kvell::memory {

inline int64_t image_pages(const Rules& group, const Image& image) {
  return ceil_div(image.image_tokens, group.page_tokens);
}

// Tokens of the prompt that are not kept once all of it is computed.
inline int64_t dropped_tokens(const Rules& group, const Facts& facts) {
  if (group.kind != Kind::kDropping) return 0;
  return std::max<int64_t>(0, facts.prompt_tokens - group.window_tokens);
}

// Position after the last one needed to compute `computed … tokens-1`.
int64_t end_position(const Rules& group, const Facts& facts, int64_t tokens, int64_t computed);
// First position that stays in use here once so many tokens are computed.
int64_t kept_from(const Rules& group, const Facts& facts, int64_t computed);
// Pages before the first one held that no longer lie elsewhere: they are missing.
inline int64_t returning_pages(const Rules& group, const Facts& facts, int64_t held_first) {
  if (group.kind != Kind::kFull || !held_first) return 0;
  return held_first - facts.away_tokens / group.page_tokens;
}
// Position after the last one kept when a prompt has just been dropped to its budget.
int64_t kept_to(const Rules& group, const Facts& facts, int64_t computed);
// First position that a request which resumes at so many tokens needs.
int64_t resumed_from(const Rules& group, const Facts& facts, int64_t length);
// Most pages held at once from `computed` to `until` tokens in prefill chunks.
int64_t peak_pages(const Rules& group, const Facts& facts, int64_t until, int64_t chunk,
                   int64_t computed);
// Pages a holder is known to want from now on: `need` of them at once.
int64_t demand_pages(const Rules& group, const Facts& facts, int64_t expected, int64_t held_end,
                     int64_t need);

// Lengths from … to, for which pages up to a position are enough.
struct Room {
  int64_t from = 0, to = kNever;
};
Room room_of(const Rules& group, const Facts& facts, int64_t held_end, int64_t computed);

}  // namespace kvell::memory
