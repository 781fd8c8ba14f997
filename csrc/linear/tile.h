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

#ifndef KVELL_AHEAD
#define KVELL_AHEAD 1024
#endif
// How far ahead each of the four rows is prefetched: 8 KiB in all.
constexpr int64_t kAheadElements = KVELL_AHEAD;

// Where the data lies that is wanted kAheadElements after element k of a tile's row: in the
// same row or at the same row of a later tile, of which `tiles_left` exist.
struct Ahead {
  Ahead(const Linear& linear, int64_t tiles_left) {
    const int64_t tiles = kAheadElements / linear.in, rest = kAheadElements % linear.in;
    const int64_t tile = kTileOut * linear.weight_stride;
    turn = linear.in - rest;
    before = tiles <= tiles_left ? tiles * tile + rest : 0;
    after = tiles < tiles_left ? (tiles + 1) * tile - turn : 0;
  }
  int64_t offset(int64_t k) const { return k < turn ? before : after; }
  int64_t turn, before, after;
};

struct TileRows {
  const uint16_t* weight[kTileOut];
  int64_t column;  // of y
  int count;       // rows of W that exist; the others repeat the last
};

template <class Lanes, int R>
static inline __attribute__((always_inline)) void step(typename Lanes::Sum (&sums)[R][kTileOut],
                                                       const typename Lanes::Items (&weights)[kTileOut],
                                                       const typename Lanes::Items (&xs)[R]) {
  for (int r = 0; r < R; ++r)
    for (int o = 0; o < kTileOut; ++o) sums[r][o] = Lanes::madd(sums[r][o], weights[o], xs[r]);
}

// R rows of x from `row` on. Only the first pass over a tile fetches ahead.
template <class Lanes, int R, bool kFetch>
void multiply(const Linear& linear, const TileRows& tile, int64_t row, const Ahead& ahead) {
  typename Lanes::Sum sums[R][kTileOut];
  typename Lanes::Items weights[kTileOut], xs[R];
  for (int r = 0; r < R; ++r)
    for (int o = 0; o < kTileOut; ++o) sums[r][o] = Lanes::zero();
  const uint16_t* x = linear.x + row * linear.x_stride;
  int64_t k = 0;
  for (; k + Lanes::kElements <= linear.in; k += Lanes::kElements) {
    if (kFetch && k % kLineElements == 0) {
      const int64_t offset = k + ahead.offset(k);
      for (int o = 0; o < kTileOut; ++o) __builtin_prefetch(tile.weight[o] + offset);
    }
    for (int o = 0; o < kTileOut; ++o) weights[o] = Lanes::load(tile.weight[o] + k);
    for (int r = 0; r < R; ++r) xs[r] = Lanes::load(x + r * linear.x_stride + k);
    step<Lanes, R>(sums, weights, xs);
  }
  if (k < linear.in) {
    const int left = static_cast<int>(linear.in - k);
    for (int o = 0; o < kTileOut; ++o) weights[o] = Lanes::load_some(tile.weight[o] + k, left);
    for (int r = 0; r < R; ++r) xs[r] = Lanes::load_some(x + r * linear.x_stride + k, left);
    step<Lanes, R>(sums, weights, xs);
  }
  const uint16_t* bias = linear.bias ? linear.bias + tile.column : nullptr;
  for (int r = 0; r < R; ++r)
    Lanes::finish(sums[r], bias, linear.y + (row + r) * linear.y_stride + tile.column, tile.count);
}

template <class Lanes, int R, bool kFetch>
void multiply_rows(const Linear& linear, const TileRows& tile, int64_t row, int64_t rows,
                   const Ahead& ahead) {
  if constexpr (R > 1) {
    if (rows < R) return multiply_rows<Lanes, R - 1, kFetch>(linear, tile, row, rows, ahead);
  }
  multiply<Lanes, R, kFetch>(linear, tile, row, ahead);
}

TileRows tile_rows(const Linear& linear, int64_t column, int64_t end) {
  TileRows tile{{}, column, static_cast<int>(std::min<int64_t>(kTileOut, end - column))};
  for (int o = 0; o < kTileOut; ++o)
    tile.weight[o] = linear.weight + (column + std::min(o, tile.count - 1)) * linear.weight_stride;
  return tile;
}

template <class Lanes>
void run_tiles(const Linear& linear, int64_t begin, int64_t end) {
  constexpr int64_t most = Lanes::kRows;
  const int64_t passes = (linear.rows + most - 1) / most;
  for (int64_t column = begin; column < end; column += kTileOut) {
    const TileRows tile = tile_rows(linear, column, end);
    const Ahead ahead(linear, (end - column) / kTileOut - 1);
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t row = linear.rows * pass / passes;
      const int64_t rows = linear.rows * (pass + 1) / passes - row;
      if (pass == 0) multiply_rows<Lanes, most, true>(linear, tile, row, rows, ahead);
      else multiply_rows<Lanes, most, false>(linear, tile, row, rows, ahead);
    }
  }
}

}  // namespace
