// Tile registers: eight of up to 16 rows of 64 bytes, whose shapes are set together.
//
// TDPBF16PS adds to c[m][n] the sum over 16 pairs: first of their low halves and of their high ones,
// each in the order of k, then both. A row of c hangs on its own row of a alone, so neither which
// rows stand beside it nor their number changes a bit.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

constexpr int kTileRows = 16, kTileRowBytes = 64;
constexpr int kTilePairs = 16;  // of bf16, in a row

// Shapes last until a thread sets others: libraries on the same threads set theirs.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int count) {
    rows[tile] = static_cast<uint8_t>(count);
    row_bytes[tile] = kTileRowBytes;
  }
  void load() const;
};
static_assert(sizeof(TileShapes) == 64, "as the instruction reads it");

// What was stored so far is in memory when the next tile is loaded: gcc's intrinsics do not say that
// they read any, so it would keep stores back, or leave out those that nobody else reads.
static inline __attribute__((always_inline)) void before_tiles() { asm volatile("" ::: "memory"); }

inline void TileShapes::load() const {
  before_tiles();
  _tile_loadconfig(this);
}

}  // namespace
