#include "items.h"

#include <algorithm>
#include <stdexcept>

#include "memory/rules.h"

namespace kvell::batching {

using memory::ceil_div;

int64_t Tiling::first_readable(int64_t position) const {
  const int64_t behind_window = window_tokens ? position - window_tokens + 1 : 0;
  const int64_t chunk_start = chunk_tokens ? position - position % chunk_tokens : 0;
  return std::max({int64_t(0), behind_window, chunk_start});
}

int64_t Tiling::section(int64_t read) const {
  int doublings = 0;
  while (doublings < kMostDoublings && read > (kMostSections * section_tokens << doublings)) ++doublings;
  return section_tokens << doublings;
}

int64_t short_items(const Lengths& lengths, const Tiling& tiling, const Capacity& capacity, int32_t* items) {
  const auto& [starts, contexts, tables, firsts] = lengths;
  const int64_t n = contexts.size;
  if (starts.size != n + 1 || tables.size != n + 1 || firsts.size != n)
    throw std::invalid_argument("lengths: the arrays are not of the same number of requests");
  int64_t count = 0, tile = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t new_tokens = int64_t(starts.data[i + 1]) - starts.data[i];
    if (new_tokens > kShortTokens) throw std::invalid_argument("lengths: a request has too many new tokens");
    const int64_t first_page = firsts.data[i], begin = first_page * tiling.page_tokens;
    const int64_t pages = int64_t(tables.data[i + 1]) - tables.data[i];
    const int64_t end = std::min<int64_t>(contexts.data[i], begin + pages * tiling.page_tokens);
    for (int64_t token = 0; token < new_tokens; token += tiling.tile_tokens, ++tile) {
      const int64_t rows = std::min(tiling.tile_tokens, new_tokens - token);
      if (tile >= capacity.tiles || rows > capacity.tile_tokens)
        throw std::invalid_argument("capacity: too few tiles, or tokens of a tile");
      const int64_t own = contexts.data[i] - new_tokens + token, low = tiling.first_readable(own);
      const int64_t size = tiling.section(own + rows - low), first = std::max(low, begin) / size;
      const int64_t sections = std::max<int64_t>(1, ceil_div(std::min(own + rows, end), size) - first);
      if (count + sections > capacity.items) throw std::invalid_argument("capacity: too few items");
      for (int64_t s = 0; s < sections; ++s, items += kItemInts) {
        const int64_t at = (first + s) * size;
        const int64_t row[kItemInts] = {tables.data[i] - first_page, begin, end, own, starts.data[i] + token, rows,
                                        at, at + size, count, sections, tile, 0};
        std::copy(row, row + kItemInts, items);
      }
      count += sections;
    }
  }
  return count;
}

}  // namespace kvell::batching
