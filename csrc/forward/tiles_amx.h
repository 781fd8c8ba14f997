// Plain weights times up to 32 rows of bf16 in tile registers.
//
//   a0, a1: 16 rows of x × 16 items      c00 c01
//   b0, b1: 16 steps of a panel × 16     c10 c11   += a · b, for 16 steps at a time
//
// A panel lies as tiles want it. Any number of rows takes the same way, one row too: what is not
// bound by memory is bound by tiles.
#pragma once
#include "cpu/tiles_amx.h"

#include "grouped.h"
#include "product.h"

namespace {

struct TileWeights : PlainInputs {
  static constexpr int64_t kBytes = kStepBytes;
  static constexpr int kRows = 2 * kTileRows;
  static constexpr bool kInParts = true;
  static constexpr kvell::Pace kPace{kRows, 64, 800 << 10};

  static Inputs inputs(const Product& product, int64_t row_begin, int64_t row_end, bool again) {
    shaped_rows() = 0;
    return PlainInputs::inputs(product, row_begin, row_end, again);
  }
  static int64_t most_rows(int64_t) { return kRows; }

  static void pass(const Tile& tile, int64_t rows, float* to) {
    steps_of(tile, rows, 0, tile.steps, to, {});
  }

  // Many rows go through a part of a panel at a time, which then stays in the first cache; between
  // parts their sums wait in memory, as they are. `done(above, count, sums)` follows the last part.
  static bool in_parts(int64_t rows, int64_t steps) { return rows > 2 * kRows && steps > kPartSteps; }

  template <class Done>
  static void pass_in_parts(const Inputs& inputs, const uint8_t* panel, const uint8_t* after,
                            int64_t steps, int64_t rows, const Landing& landing, Done done) {
    thread_local AlignedBytes memory;
    float* const sums = reinterpret_cast<float*>(memory.of(rows * kPanel * 4));
    const int64_t passes = (rows + kRows - 1) / kRows, parts = (steps + kPartSteps - 1) / kPartSteps;
    const int64_t part = (steps + parts * kTilePairs - 1) / (parts * kTilePairs) * kTilePairs;
    for (int64_t begin = 0; begin < steps; begin += part)
      for (int64_t pass = 0; pass < passes; ++pass) {
        const int64_t above = rows * pass / passes, count = rows * (pass + 1) / passes - above;
        const Tile tile{skip(inputs, above), panel, nullptr, steps, 0,
                        fetch_of<kBytes>(panel, steps * kBytes, after, pass, passes)};
        const bool last = begin + part >= steps;
        steps_of(tile, count, begin, std::min(begin + part, steps), sums + above * kPanel,
                 landing.of(above, last ? count : 0));
        if (last) done(above, count, sums + above * kPanel);
      }
  }

 private:
  static constexpr int64_t kPartSteps = 160;  // 20 KiB of a panel, as much of its rows beside it
  static constexpr int64_t kAskParts = 4, kAskSteps = kTilePairs / kAskParts;
  static constexpr int64_t kAskRows = 4;  // of 32, in one of the ten chunks that a part has at most
  static constexpr int64_t kChunkBytes = kTilePairs * kStepBytes;

  // Rows that this thread's tiles are shaped for; 0: others may have shaped them.
  static int64_t& shaped_rows() {
    thread_local int64_t rows = 0;
    return rows;
  }

  // c00 c01 c10 c11 are tiles 0 to 3, a0 a1 4 and 5, b0 b1 6 and 7.
  static void shape(int64_t rows) {
    if (shaped_rows() == rows) return;
    shaped_rows() = rows;
    const int above = static_cast<int>(std::min<int64_t>(rows, kTileRows));
    const int below = rows > kTileRows ? static_cast<int>(rows - kTileRows) : kTileRows;
    TileShapes shapes;
    for (int tile : {0, 1, 4}) shapes.set(tile, above);
    for (int tile : {2, 3, 5}) shapes.set(tile, below);
    for (int tile : {6, 7}) shapes.set(tile, kTileRows);
    shapes.load();
  }

  // Calls ask(part) for each of kAskParts parts of its steps, between tiles: in one go, requests fill what a
  // core has under way, and the tiles wait behind them.
  template <bool Both, class Ask>
  KVELL_INLINE void add_chunk(const uint32_t* x, int64_t x_stride_bytes, const uint8_t* panel, Ask ask) {
    ask(0);
    _tile_loadd(6, panel, kStepBytes);
    ask(1);
    _tile_loadd(4, x, x_stride_bytes);
    _tile_dpbf16ps(0, 4, 6);
    ask(2);
    _tile_loadd(7, panel + kTileRowBytes, kStepBytes);
    ask(3);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (Both) {
      _tile_loadd(5, reinterpret_cast<const uint8_t*>(x) + kTileRows * x_stride_bytes,
                  x_stride_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }

  // `to`, or nothing where they begin, and steps [begin, end).
  static void steps_of(const Tile& tile, int64_t rows, int64_t begin, int64_t end, float* to,
                       Landing landing) {
    shape(rows);
    if (rows > kTileRows)
      multiply<true>(tile, rows, begin, end, to, landing);
    else
      multiply<false>(tile, rows, begin, end, to, landing);
  }

  template <bool Both>
  KVELL_INLINE void load_sums(const float* from) {
    _tile_loadd(0, from, kPanel * 4);
    _tile_loadd(1, from + kTileRows, kPanel * 4);
    if constexpr (Both) {
      _tile_loadd(2, from + kTileRows * kPanel, kPanel * 4);
      _tile_loadd(3, from + kTileRows * kPanel + kTileRows, kPanel * 4);
    }
  }

  template <bool Both>
  KVELL_INLINE void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (Both) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }

  template <bool Both>
  static void multiply(const Tile& tile, int64_t rows, int64_t begin, int64_t end, float* to,
                       Landing landing) {
    const int64_t stride = tile.x.stride * 4, whole = end / kTilePairs * kTilePairs;
    before_tiles();
    if (begin == 0)
      clear_sums<Both>();
    else
      load_sums<Both>(to);
    for (int64_t k = begin; k < whole; k += kTilePairs) {
      landing.ask(kAskRows);
      const auto ask = [&](int part) __attribute__((always_inline)) {
        fetch(tile, k + part * kAskSteps, k + (part + 1) * kAskSteps);
      };
      add_chunk<Both>(tile.x.items + k, stride, tile.panel + k * kStepBytes, ask);
    }
    if (whole < end) {
      fetch(tile, whole, end);
      add_rest<Both>(tile, rows, whole);
    }
    _tile_stored(0, to, kPanel * 4);
    _tile_stored(1, to + kTileRows, kPanel * 4);
    if constexpr (Both) {
      _tile_stored(2, to + kTileRows * kPanel, kPanel * 4);
      _tile_stored(3, to + kTileRows * kPanel + kTileRows, kPanel * 4);
    }
  }

  // The last steps, fewer than a tile has: what is missing is zeros.
  template <bool Both>
  static void add_rest(const Tile& tile, int64_t rows, int64_t begin) {
    alignas(64) uint32_t x[kRows * kTilePairs];
    alignas(64) uint8_t panel[kChunkBytes];
    const int64_t steps = tile.steps - begin;
    std::memset(x, 0, rows * kTileRowBytes);
    for (int64_t row = 0; row < rows; ++row)
      std::memcpy(x + row * kTilePairs, tile.x.items + row * tile.x.stride + begin, steps * 4);
    std::memcpy(panel, tile.panel + begin * kStepBytes, steps * kStepBytes);
    std::memset(panel + steps * kStepBytes, 0, (kTilePairs - steps) * kStepBytes);
    before_tiles();
    add_chunk<Both>(x, kTileRowBytes, panel, [](int) {});
  }

  // What steps_of fetches for steps [begin, end): once, into the second cache. A prefetch waits here for its
  // place, so asking again would take one from others.
  KVELL_INLINE void fetch(const Tile& tile, int64_t begin, int64_t end) {
    if (tile.fetch.lines == 0) return;
    for (int64_t k = begin; k < end; ++k) {
      const uint8_t* ahead = k < tile.fetch.split ? tile.fetch.first : tile.fetch.second;
      if (!ahead) return;
      for (int line = 0; line < tile.fetch.lines; ++line)
        __builtin_prefetch(ahead + k * kStepBytes + line * 64, 0, 2);
    }
  }
};

}  // namespace
