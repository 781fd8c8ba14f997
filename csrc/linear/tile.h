// Four rows of W times a few rows of x, in registers.
//
// Lanes says how many elements one step takes (kElements), how they are loaded and
// multiplied, and how four sums are folded and stored.
#pragma once
#include <algorithm>

#include "linear.h"

namespace {

using kvell::Linear;

constexpr int kTileOut = 4;       // rows of W at a time
constexpr int kLineElements = 32;  // of one cache line

// Forced, because gcc takes a function that only prefetches for one without effects and
// drops its calls.
#define KVELL_INLINE inline __attribute__((always_inline))

// How far ahead of its use W is fetched into the second and then into the first cache.
// In one go would be slower by up to a third: what waits for memory then holds the few
// slots that x, read again and again from the second cache, needs too.
constexpr int64_t kFarElements = 20480, kNearElements = 4096;

// W as one stream in the order of its addresses: four rows at a time in lockstep is an
// order that memory answers at a third of its speed. The passes over a tile share the
// fetching of one tile's worth of lines.
struct Fetch {
  const uint16_t *far, *near;  // null: nothing is left to fetch
  int lines;                   // of each step of kLineElements

  KVELL_INLINE void operator()(int64_t k) const {
    for (int line = 0; line < lines; ++line) {
      const int64_t element = k * lines + line * kLineElements;
      if (far) __builtin_prefetch(far + element, 0, 2);
      if (near) __builtin_prefetch(near + element, 0, 3);
    }
  }
};

// What pass `pass` over the tile at `tile` fetches, of a stream that ends at `stop`.
Fetch fetch_of(const uint16_t* tile, const uint16_t* stop, int64_t in, int64_t pass, int64_t passes) {
  const int lines = static_cast<int>((kTileOut + passes - 1) / passes);
  if (pass * lines >= kTileOut) return {nullptr, nullptr, 0};
  const int64_t left = stop - tile - pass * lines * in;
  const uint16_t* from = stop - left;
  return {left > kFarElements ? from + kFarElements : nullptr,
          left > kNearElements ? from + kNearElements : nullptr, lines};
}

// The start of the stream, before its first tile.
KVELL_INLINE void fetch_start(const uint16_t* from, int64_t elements) {
  const int64_t near = std::min(kNearElements, elements), far = std::min(kFarElements, elements);
  for (int64_t k = 0; k < near; k += kLineElements) __builtin_prefetch(from + k, 0, 3);
  for (int64_t k = near; k < far; k += kLineElements) __builtin_prefetch(from + k, 0, 2);
}

struct TileRows {
  const uint16_t* weight[kTileOut];
  int64_t column;  // of y
  int count;       // rows of W that exist; the others repeat the last
};

// One step of R rows of x over a tile: loads by `load`, of elements from k on.
template <class Lanes, int R, class Load>
KVELL_INLINE void step(typename Lanes::Sum (&sums)[R][kTileOut], const TileRows& tile,
                       const uint16_t* x, int64_t x_stride, int64_t k, Load load) {
  typename Lanes::Items weights[kTileOut];
  for (int o = 0; o < kTileOut; ++o) weights[o] = load(tile.weight[o] + k);
  for (int r = 0; r < R; ++r) {
    const typename Lanes::Items items = load(x + r * x_stride + k);
    for (int o = 0; o < kTileOut; ++o) sums[r][o] = Lanes::madd(sums[r][o], weights[o], items);
  }
}

// R rows of x from `row` on.
template <class Lanes, int R>
void multiply(const Linear& linear, const TileRows& tile, int64_t row, const Fetch& fetch) {
  typename Lanes::Sum sums[R][kTileOut];
  for (int r = 0; r < R; ++r)
    for (int o = 0; o < kTileOut; ++o) sums[r][o] = Lanes::zero();
  const uint16_t* x = linear.x + row * linear.x_stride;
  const auto take = [&](int64_t k) {
    step<Lanes, R>(sums, tile, x, linear.x_stride, k, [](const uint16_t* p) { return Lanes::load(p); });
  };
  int64_t k = 0;
  for (; k + kLineElements <= linear.in; k += kLineElements) {
    fetch(k);
    for (int part = 0; part < kLineElements; part += Lanes::kElements) take(k + part);
  }
  for (; k + Lanes::kElements <= linear.in; k += Lanes::kElements) take(k);
  const int left = static_cast<int>(linear.in - k);
  if (left > 0)
    step<Lanes, R>(sums, tile, x, linear.x_stride, k,
                   [left](const uint16_t* p) { return Lanes::load_some(p, left); });
  const uint16_t* bias = linear.bias ? linear.bias + tile.column : nullptr;
  for (int r = 0; r < R; ++r)
    Lanes::finish(sums[r], bias, linear.y + (row + r) * linear.y_stride + tile.column, tile.count);
}

template <class Lanes, int R>
void multiply_rows(const Linear& linear, const TileRows& tile, int64_t row, int64_t rows,
                   const Fetch& fetch) {
  if constexpr (R > 1) {
    if (rows < R) return multiply_rows<Lanes, R - 1>(linear, tile, row, rows, fetch);
  }
  multiply<Lanes, R>(linear, tile, row, fetch);
}

TileRows tile_rows(const Linear& linear, int64_t column, int64_t end) {
  TileRows tile{{}, column, static_cast<int>(std::min<int64_t>(kTileOut, end - column))};
  for (int o = 0; o < kTileOut; ++o)
    tile.weight[o] = linear.weight + (column + std::min(o, tile.count - 1)) * linear.in;
  return tile;
}

template <class Lanes>
void run_tiles(const Linear& linear, int64_t begin, int64_t end) {
  const int64_t passes = (linear.rows + Lanes::kRows - 1) / Lanes::kRows;
  const uint16_t* const stop = linear.weight + end * linear.in;
  fetch_start(linear.weight + begin * linear.in, (end - begin) * linear.in);
  for (int64_t column = begin; column < end; column += kTileOut) {
    const TileRows tile = tile_rows(linear, column, end);
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t row = linear.rows * pass / passes;
      const int64_t rows = linear.rows * (pass + 1) / passes - row;
      const Fetch fetch = fetch_of(tile.weight[0], stop, linear.in, pass, passes);
      multiply_rows<Lanes, Lanes::kRows>(linear, tile, row, rows, fetch);
    }
  }
}

}  // namespace
