// Rows of float32 times weights that become float32 as they are multiplied.
//
// For processors without dot products of bf16, or with slow ones: floats are multiplied at full
// rate everywhere. Rows of bf16 are widened once for all panels; a panel's halves are shifted or
// masked into registers, two instructions for `kRows` times as many products. A sum runs over the
// numbers of a row in their order, however many rows there are.
//
// K says: K::Lanes, K::part<P> (a register of the items' numbers P), K::kWideRows and
// K::kWideColumns (rows and registers of a panel at a time), and how a row is widened.
#pragma once
#include "aligned.h"
#include "product.h"

namespace {

// How rows of bf16 lie: widened, in memory of the thread, until its next product.
template <class K>
struct WidenedRows : PlainInputs {
  static Inputs inputs(const Product& product, int64_t row_begin, int64_t row_end, bool again) {
    thread_local AlignedBytes memory;
    const int64_t steps = product.matrix->steps, stride = apart(2 * steps);
    auto* const floats = reinterpret_cast<float*>(memory.of((row_end - row_begin) * stride * 4));
    for (int64_t row = row_begin; !again && row < row_end; ++row)
      K::widen(floats + (row - row_begin) * stride,
               reinterpret_cast<const uint16_t*>(product.x + row * product.x_stride), 2 * steps);
    return {reinterpret_cast<const uint32_t*>(floats), stride, nullptr, nullptr, 0};
  }

 private:
  // Whole lines, and one more: rows a power of two apart would share a few sets of the cache.
  static int64_t apart(int64_t numbers) { return (numbers + 15) / 16 * 16 + 16; }
};

template <class K, class Rows>
struct WideSteps : Rows {
  using Vec = typename K::Lanes::Vec;
  static constexpr int kRows = K::kWideRows;

  // Registers of a panel's step at a time: few rows read it in one run.
  template <int R>
  static constexpr int columns() {
    constexpr int kAll = kPanel / K::Lanes::kWidth;
    return R * kAll <= kRows * K::kWideColumns ? kAll : K::kWideColumns;
  }

  template <int R, int C, int Lines>
  KVELL_INLINE void add(Vec (&acc)[R][C], const Inputs& x, const uint8_t* panel, int64_t begin,
                        int64_t end, const uint8_t* ahead) {
    const float* const numbers = reinterpret_cast<const float*>(x.items);
    for (int64_t k = begin; k < end; ++k) {
      fetch_step<Lines>(panel, ahead, k);
      add_part<R, C, 0>(acc, numbers + k * kPerItem<K>, x.stride, panel + k * kStepBytes);
      if constexpr (kPerItem<K> > 1)
        add_part<R, C, 1>(acc, numbers + k * kPerItem<K> + 1, x.stride, panel + k * kStepBytes);
    }
  }

 private:
  template <int R, int C, int P>
  KVELL_INLINE void add_part(Vec (&acc)[R][C], const float* x, int64_t stride, const uint8_t* items) {
    using L = typename K::Lanes;
    Vec part[C];
    for (int c = 0; c < C; ++c) part[c] = K::template part<P>(items + c * L::kWidth * 4);
    for (int r = 0; r < R; ++r) {
      const Vec number = L::set(x[r * stride]);
      for (int c = 0; c < C; ++c) acc[r][c] = L::madd(number, part[c], acc[r][c]);
    }
  }
};

}  // namespace
