// The sections of short tiles of attention in Triton: what `cut_short` of attention/triton/work.py
// returns, written in one pass.
#pragma once
#include <cstdint>

#include "memory/facts.h"

namespace kvell::batching {

using memory::Ints;

// A request with more new tokens is not short.
constexpr int64_t kShortTokens = 16;
constexpr int64_t kItemInts = 12;
// From so many sections on, a tile's sections double in size, at most twice.
constexpr int64_t kMostSections = 8;
constexpr int kMostDoublings = 2;

// window_tokens, chunk_tokens: 0 for none.
struct Tiling {
  int64_t tile_tokens, section_tokens, page_tokens, window_tokens, chunk_tokens;

  int64_t first_readable(int64_t position) const;
  int64_t section(int64_t read) const;
};

// query_starts [n+1], context_lens [n], table_starts [n+1], first_positions [n].
struct Lengths {
  Ints query_starts, context_lens, table_starts, first_positions;
};

struct Capacity {
  int64_t items, tiles, tile_tokens;
};

// Writes rows of kItemInts numbers and returns how many.
// Throws std::invalid_argument if lengths disagree, a request is not short, or the capacity is too small.
int64_t short_items(const Lengths& lengths, const Tiling& tiling, const Capacity& capacity, int32_t* items);

}  // namespace kvell::batching
