// Rows of x times a panel of W, in registers.
//
// K says how items are multiplied: K::Lanes, K::load (a register of items), K::broadcast,
// K::madd (acc, item, items), K::kRows (rows at a time).
#pragma once
#include <algorithm>

#include "finish.h"

namespace {

using kvell::kPanel;
using kvell::kStepBytes;
using kvell::Product;

// What a pass over a panel fetches for later: `lines` of each step's two, from `first` while
// the step is below `split` and from `second` on.
struct Fetch {
  const uint8_t *first, *second;
  int64_t split;
  int lines;
};

// How far ahead of its use a weight is asked for: into the second cache, then, where one pass
// reads it straight from memory, into the first (one distance for both was up to a fifth slower).
constexpr int64_t kAheadBytes = 48 << 10, kNearBytes = 4 << 10;

// The stream goes on `ahead` bytes further, in this panel or in the one that comes next.
Fetch fetch_of(const uint8_t* panel, int64_t panel_bytes, const uint8_t* next, int64_t pass,
               int64_t passes) {
  const int lines = passes == 1 ? 2 : pass < 2 ? 1 : 0;
  const int64_t ahead = std::min(panel_bytes, kAheadBytes), steps = panel_bytes / kStepBytes;
  const int64_t split = (panel_bytes - ahead) / kStepBytes, at = passes == 1 ? 0 : 64 * pass;
  if (lines == 0) return {nullptr, nullptr, steps, 0};
  return {panel + ahead + at, next ? next - split * kStepBytes + at : nullptr,
          next ? split : std::min(split, steps), lines};
}

template <class K, int R, int Lines>
KVELL_INLINE void steps_of(typename K::Lanes::Vec (&acc)[R][kPanel / K::Lanes::kWidth],
                           const uint32_t* x, int64_t x_stride, const uint8_t* panel, int64_t begin,
                           int64_t end, const uint8_t* ahead) {
  constexpr int C = kPanel / K::Lanes::kWidth;
  for (int64_t k = begin; k < end; ++k) {
    for (int line = 0; line < Lines; ++line) {
      __builtin_prefetch(ahead + k * kStepBytes + line * 64, 0, 2);
      if (Lines == 2) __builtin_prefetch(panel + k * kStepBytes + line * 64 + kNearBytes, 0, 3);
    }
    typename K::Items items[C];
    for (int c = 0; c < C; ++c)
      items[c] = K::load(panel + k * kStepBytes + c * K::Lanes::kWidth * 4);
    for (int r = 0; r < R; ++r) {
      const auto item = K::broadcast(x[r * x_stride + k]);
      for (int c = 0; c < C; ++c) acc[r][c] = K::madd(acc[r][c], item, items[c]);
    }
  }
}

template <class K, int R, int Lines>
void sums_of(const uint32_t* x, int64_t x_stride, const uint8_t* panel, int64_t steps,
             const Fetch& fetch, float* sums) {
  using L = typename K::Lanes;
  constexpr int C = kPanel / L::kWidth;
  typename L::Vec acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = L::zero();
  if constexpr (Lines > 0) {
    steps_of<K, R, Lines>(acc, x, x_stride, panel, 0, fetch.split, fetch.first);
    if (fetch.second)
      steps_of<K, R, Lines>(acc, x, x_stride, panel, fetch.split, steps, fetch.second);
    else
      steps_of<K, R, 0>(acc, x, x_stride, panel, fetch.split, steps, nullptr);
  } else {
    steps_of<K, R, 0>(acc, x, x_stride, panel, 0, steps, nullptr);
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) L::store(sums + r * kPanel + c * L::kWidth, acc[r][c]);
}

// One pass: `rows` rows, at most K::kRows.
template <class K, int R>
void pass_of(const uint32_t* x, int64_t x_stride, int64_t rows, const uint8_t* panel, int64_t steps,
             const Fetch& fetch, float* sums) {
  if constexpr (R > 1) {
    if (rows < R) return pass_of<K, R - 1>(x, x_stride, rows, panel, steps, fetch, sums);
  }
  if (fetch.lines == 2) return sums_of<K, R, 2>(x, x_stride, panel, steps, fetch, sums);
  if (fetch.lines == 1) return sums_of<K, R, 1>(x, x_stride, panel, steps, fetch, sums);
  sums_of<K, R, 0>(x, x_stride, panel, steps, fetch, sums);
}

template <class K>
void product(const Product& product, kvell::Activation activation, int64_t panel_begin,
             int64_t panel_end, int64_t row_begin, int64_t row_end, const uint8_t* next) {
  const kvell::Matrix& matrix = *product.matrix;
  const int64_t rows = row_end - row_begin, passes = (rows + K::kRows - 1) / K::kRows;
  for (int64_t p = panel_begin; p < panel_end; ++p) {
    const uint8_t* panel = matrix.panel(p);
    const uint8_t* after = p + 1 < panel_end ? panel + matrix.panel_bytes() : next;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t row = row_begin + rows * pass / passes;
      const int64_t count = row_begin + rows * (pass + 1) / passes - row;
      alignas(64) float sums[K::kRows * kPanel];
      pass_of<K, K::kRows>(product.x + row * product.x_stride, product.x_stride, count, panel,
                           matrix.steps, fetch_of(panel, matrix.panel_bytes(), after, pass, passes),
                           sums);
      for (int64_t r = 0; r < count; ++r)
        finish_row<K>(product, activation, p, row + r, sums + r * kPanel);
    }
  }
}

}  // namespace
