// Rows of x times a panel of W, in registers.
//
// K says how items are multiplied: K::Lanes, K::load (a register of items), K::broadcast,
// K::madd (acc, item, items), K::kRows (rows at a time).
#pragma once
#include <algorithm>

#include "finish.h"
#include "kernels.h"

namespace {

using kvell::kPanel;
using kvell::kStepBytes;
using kvell::Product;

// What a pass over a panel fetches for later: `lines` of each step's two, from `first` while
// the step is below `split` and from `second` on. (Groups: see grouped.h.)
struct Fetch {
  const uint8_t *first, *second;
  int64_t split;
  int lines;
};

// Rows of x as a form of weights multiplies them (grouped.h, whole_avx512.h say how they lie).
struct Inputs {
  const uint32_t* items;
  int64_t stride;
  const float *sums, *powers;  // of every row's groups, or null
  int64_t sums_stride;
};

// Some rows, and the panel that they are multiplied by.
struct Tile {
  Inputs x;
  const uint8_t* panel;
  const uint8_t* items;  // the panel's, unpacked; or null: they are made as they are multiplied
  int64_t steps, groups;
  Fetch fetch;
};

// Numbers in one item.
template <class K>
constexpr int64_t kPerItem = 4 / int64_t(sizeof(typename K::Element));

// How far ahead of its use a weight is asked for: into the second cache, then, where one pass
// reads it straight from memory, into the first (one distance for both was up to a fifth slower).
// What finds no room among the lines under way is dropped, so it is asked for again so many bytes later.
constexpr int64_t kAheadBytes = 48 << 10, kNearBytes = 4 << 10, kAgainBytes = 28 * 64;

// The stream goes on `ahead` bytes further, in this panel or in the one that comes next.
template <int64_t StepBytes>
Fetch fetch_of(const uint8_t* panel, int64_t panel_bytes, const uint8_t* next, int64_t pass,
               int64_t passes) {
  constexpr bool kHalves = StepBytes == kStepBytes;
  const int lines = passes == 1 ? 2 : pass < (kHalves ? 2 : 1) ? 1 : 0;
  const int64_t steps = panel_bytes / StepBytes;
  const int64_t ahead = std::min(steps, kAheadBytes / StepBytes) * StepBytes;
  const int64_t split = (panel_bytes - ahead) / StepBytes, at = passes == 1 ? 0 : 64 * pass;
  if (lines == 0) return {nullptr, nullptr, steps, 0};
  return {panel + ahead + at, next ? next - split * StepBytes + at : nullptr, split, lines};
}

template <int Lines>
KVELL_INLINE void fetch_step(const uint8_t* panel, const uint8_t* ahead, int64_t k) {
  for (int line = 0; line < Lines; ++line) {
    __builtin_prefetch(ahead + k * kStepBytes + line * 64, 0, 2);
    __builtin_prefetch(ahead + k * kStepBytes + line * 64 - kAgainBytes, 0, 2);
    if (Lines == 2) __builtin_prefetch(panel + k * kStepBytes + line * 64 + kNearBytes, 0, 3);
  }
}

// One pass: `rows` rows, at most R, by the function for just so many.
template <class Weights, int R>
void pass_of(const Tile& tile, int64_t rows, float* sums) {
  if constexpr (R > 1) {
    if (rows < R) return pass_of<Weights, R - 1>(tile, rows, sums);
  }
  Weights::template sums<R>(tile, sums);
}

// What plain weights take rows of x as: they lie in memory as they are multiplied.
struct PlainInputs {
  static Inputs inputs(const Product& product, int64_t row_begin, int64_t, bool) {
    return {product.x + row_begin * product.x_stride, product.x_stride, nullptr, nullptr, 0};
  }
  static Inputs skip(const Inputs& inputs, int64_t rows) {
    return {inputs.items + rows * inputs.stride, inputs.stride, nullptr, nullptr, 0};
  }
  static const uint8_t* unpacked(const uint8_t*, int64_t, int64_t) { return nullptr; }
};

// Items of rows and weights, multiplied as they are in memory.
template <class K>
struct ItemSteps : PlainInputs {
  using Vec = typename K::Lanes::Vec;
  static constexpr int kRows = K::kRows;

  template <int R>
  static constexpr int columns() {
    return kPanel / K::Lanes::kWidth;
  }

  template <int R, int C, int Lines>
  KVELL_INLINE void add(Vec (&acc)[R][C], const Inputs& x, const uint8_t* panel, int64_t begin,
                        int64_t end, const uint8_t* ahead) {
    for (int64_t k = begin; k < end; ++k) {
      fetch_step<Lines>(panel, ahead, k);
      typename K::Items items[C];
      for (int c = 0; c < C; ++c)
        items[c] = K::load(panel + k * kStepBytes + c * K::Lanes::kWidth * 4);
      for (int r = 0; r < R; ++r) {
        const auto item = K::broadcast(x.items[r * x.stride + k]);
        for (int c = 0; c < C; ++c) acc[r][c] = K::madd(acc[r][c], item, items[c]);
      }
    }
  }
};

// Plain weights. Steps says how rows lie and how a panel's steps are added to registers: all of a
// step's 32 outputs at a time, or Steps::columns of their registers.
template <class K, class Steps>
struct PlainWeights : Steps {
  static constexpr int64_t kBytes = kStepBytes;
  static constexpr int kRows = Steps::kRows;
  static constexpr bool kInParts = false;
  static constexpr kvell::Pace kPace{kRows, 16, 288 << 10};

  static int64_t most_rows(int64_t) { return kRows; }

  template <int R>
  static void sums(const Tile& tile, float* to) {
    if (tile.fetch.lines == 2) return in_columns<R, 2>(tile, to);
    if (tile.fetch.lines == 1) return in_columns<R, 1>(tile, to);
    in_columns<R, 0>(tile, to);
  }

  static void pass(const Tile& tile, int64_t rows, float* to) {
    pass_of<PlainWeights, kRows>(tile, rows, to);
  }

 private:
  using L = typename K::Lanes;

  // The first columns fetch for all.
  template <int R, int Lines>
  static void in_columns(const Tile& tile, float* to) {
    constexpr int C = Steps::template columns<R>();
    streamed<R, C, Lines>(tile, tile.panel, to);
    for (int c = C * L::kWidth; c < kPanel; c += C * L::kWidth)
      streamed<R, C, 0>(tile, tile.panel + c * 4, to + c);
  }

  template <int R, int C, int Lines>
  static void streamed(const Tile& tile, const uint8_t* panel, float* to) {
    const Fetch& fetch = tile.fetch;
    typename L::Vec acc[R][C];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) acc[r][c] = L::zero();
    if constexpr (Lines > 0) {
      Steps::template add<R, C, Lines>(acc, tile.x, panel, 0, fetch.split, fetch.first);
      if (fetch.second)
        Steps::template add<R, C, Lines>(acc, tile.x, panel, fetch.split, tile.steps, fetch.second);
      else
        Steps::template add<R, C, 0>(acc, tile.x, panel, fetch.split, tile.steps, nullptr);
    } else {
      Steps::template add<R, C, 0>(acc, tile.x, panel, 0, tile.steps, nullptr);
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) L::store(to + r * kPanel + c * L::kWidth, acc[r][c]);
  }
};

template <class K, class Weights>
void product_of(const Product& product, kvell::Activation activation, int64_t panel_begin,
                int64_t panel_end, int64_t row_begin, int64_t row_end, bool again,
                const uint8_t* next) {
  const kvell::Matrix& matrix = *product.matrix;
  const int64_t rows = row_end - row_begin, most = Weights::most_rows(rows);
  const int64_t passes = (rows + most - 1) / most;
  const Inputs inputs = Weights::inputs(product, row_begin, row_end, again);
  for (int64_t p = panel_begin; p < panel_end; ++p) {
    const uint8_t* panel = matrix.panel(p);
    const uint8_t* after = p + 1 < panel_end ? panel + matrix.panel_bytes() : next;
    if constexpr (Weights::kInParts) {
      if (Weights::in_parts(rows, matrix.steps)) {
        Weights::pass_in_parts(inputs, panel, after, matrix.steps, rows,
                               landing_of<K>(product, p, row_begin, rows),
                               [&](int64_t above, int64_t count, float* sums) {
                                 finish_rows<K>(product, activation, p, row_begin + above, count, sums);
                               });
        continue;
      }
    }
    const uint8_t* items = Weights::unpacked(panel, matrix.steps, rows);
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t above = rows * pass / passes;
      const int64_t count = rows * (pass + 1) / passes - above;
      const Tile tile{Weights::skip(inputs, above), panel, items, matrix.steps, matrix.groups,
                      fetch_of<Weights::kBytes>(panel, matrix.panel_bytes(), after, pass, passes)};
      alignas(64) float sums[Weights::kRows * kPanel];
      Weights::pass(tile, count, sums);
      finish_rows<K>(product, activation, p, row_begin + above, count, sums);
    }
  }
}

}  // namespace
