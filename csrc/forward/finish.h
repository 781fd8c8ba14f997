// What becomes of 32 sums of a row, and the small functions of rows: norms, activations.
#pragma once
#include <cmath>

#include "attention/softmax.h"
#include "matrix.h"

namespace {

using kvell::Activation;
using kvell::Goal;

template <class L>
KVELL_INLINE typename L::Vec times(typename L::Vec a, typename L::Vec b) {
  return L::madd(a, b, L::zero());
}

// x · sigmoid(x); exp is only ever taken of what is not above 0.
template <class L>
KVELL_INLINE typename L::Vec silu_of(typename L::Vec x) {
  const auto small = exp_of<L>(L::min(x, L::madd(x, L::set(-1.0f), L::zero())));
  const auto above = L::where_less(x, L::zero(), small, L::set(1.0f));
  return L::div(times<L>(x, above), L::madd(small, L::set(1.0f), L::set(1.0f)));
}

// x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))
template <class L>
KVELL_INLINE typename L::Vec gelu_tanh_of(typename L::Vec x) {
  const auto cube = times<L>(times<L>(x, x), x);
  const auto inner = times<L>(L::madd(cube, L::set(0.044715f), x), L::set(0.7978845608028654f));
  const auto half = times<L>(x, L::set(0.5f));
  return L::madd(half, tanh_of<L>(inner), half);
}

template <class L>
KVELL_INLINE typename L::Vec activate(Activation activation, typename L::Vec x) {
  return activation == Activation::silu ? silu_of<L>(x) : gelu_tanh_of<L>(x);
}

template <class L>
KVELL_INLINE void cap(float* x, float softcap) {
  for (int i = 0; i < kvell::kPanel; i += L::kWidth)
    L::store(x + i, times<L>(tanh_of<L>(L::div(L::load(x + i), L::set(softcap))), L::set(softcap)));
}

// [gates 16 | ups 16] → 16 elements, of some rows, `stride` elements apart.
template <class K, Activation Of>
void gate_rows(typename K::Element* y, int64_t stride, int64_t rows, const float* sums) {
  using L = typename K::Lanes;
  constexpr int kHalf = kvell::kPanel / 2;
  for (int64_t row = 0; row < rows; ++row, y += stride, sums += kvell::kPanel) {
    alignas(64) float gated[kHalf];
    for (int i = 0; i < kHalf; i += L::kWidth)
      L::store(gated + i, times<L>(activate<L>(Of, L::load(sums + i)), L::load(sums + kHalf + i)));
    K::store_elements(y, gated, kHalf);
  }
}

template <class K>
void finish_gates(const kvell::Finish& finish, Activation activation, int64_t at, int64_t rows,
                  const float* sums) {
  auto* y = static_cast<typename K::Element*>(finish.y) + at;
  if (activation == Activation::silu)
    return gate_rows<K, Activation::silu>(y, finish.y_stride, rows, sums);
  gate_rows<K, Activation::gelu_tanh>(y, finish.y_stride, rows, sums);
}

template <class K>
KVELL_INLINE void finish_row(const kvell::Product& product, Activation activation, int64_t panel,
                             int64_t row, float* sums) {
  using L = typename K::Lanes;
  const kvell::Finish& finish = product.finish;
  const kvell::Matrix& matrix = *product.matrix;
  const int64_t column = panel * kvell::kPanel;
  if (matrix.factors)
    for (int i = 0; i < kvell::kPanel; i += L::kWidth)
      L::store(sums + i, times<L>(L::load(sums + i), L::load(matrix.factors + column + i)));
  if (matrix.bias)
    for (int i = 0; i < kvell::kPanel; i += L::kWidth)
      L::store(sums + i, L::madd(L::load(matrix.bias + column + i), L::set(1.0f), L::load(sums + i)));
  if (finish.goal == Goal::gate)
    return finish_gates<K>(finish, activation, row * finish.y_stride + column / 2, 1, sums);
  float* y = static_cast<float*>(finish.y) + row * finish.y_stride + column;
  const int64_t count = matrix.out - column < kvell::kPanel ? matrix.out - column : kvell::kPanel;
  if (finish.softcap > 0.0f) cap<L>(sums, finish.softcap);
  if (finish.goal == Goal::store)
    for (int64_t i = 0; i < count; ++i) y[i] = sums[i];
  else
    for (int64_t i = 0; i < count; ++i) y[i] += finish.factor * sums[i];
}

template <class L, bool Add>
void whole_rows(float* y, int64_t stride, int64_t rows, float factor, const float* sums) {
  for (int64_t row = 0; row < rows; ++row, y += stride, sums += kvell::kPanel)
    for (int i = 0; i < kvell::kPanel; i += L::kWidth) {
      const auto sum = L::load(sums + i);
      L::store(y + i, Add ? L::madd(L::set(factor), sum, L::load(y + i)) : sum);
    }
}

// Where a panel's numbers of some rows will be written: lines far from each other, which are asked for
// while the rows are multiplied.
struct Landing {
  uint8_t* at;
  int64_t stride_bytes, rows;
  int lines;  // of each row

  Landing of(int64_t above, int64_t count) const {
    return {at + above * stride_bytes, stride_bytes, count, lines};
  }
  // Asks for the next rows', if there are any left.
  inline __attribute__((always_inline)) void ask(int64_t next_rows) {
    for (; next_rows > 0 && rows > 0; --next_rows, --rows, at += stride_bytes)
      for (int line = 0; line < lines; ++line) __builtin_prefetch(at + 64 * line, 1, 3);
  }
};

template <class K>
Landing landing_of(const kvell::Product& product, int64_t panel, int64_t row, int64_t rows) {
  const kvell::Finish& finish = product.finish;
  const bool gates = finish.goal == Goal::gate;
  const int64_t size = gates ? sizeof(typename K::Element) : 4;
  const int64_t column = panel * kvell::kPanel / (gates ? 2 : 1);
  uint8_t* at = static_cast<uint8_t*>(finish.y) + (row * finish.y_stride + column) * size;
  return {at, finish.y_stride * size, rows, gates ? 1 : 2};
}

// The same of `rows` rows from `row` on: what a panel without anything of its own asks for is
// looked up once.
template <class K>
void finish_rows(const kvell::Product& product, Activation activation, int64_t panel, int64_t row,
                 int64_t rows, float* sums) {
  const kvell::Finish& finish = product.finish;
  const kvell::Matrix& matrix = *product.matrix;
  const int64_t column = panel * kvell::kPanel, stride = finish.y_stride;
  const bool plain = !matrix.factors && !matrix.bias && finish.softcap <= 0.0f;
  if (plain && finish.goal == Goal::gate)
    return finish_gates<K>(finish, activation, row * stride + column / 2, rows, sums);
  if (plain && column + kvell::kPanel <= matrix.out) {
    float* y = static_cast<float*>(finish.y) + row * stride + column;
    if (finish.goal == Goal::store)
      return whole_rows<typename K::Lanes, false>(y, stride, rows, finish.factor, sums);
    return whole_rows<typename K::Lanes, true>(y, stride, rows, finish.factor, sums);
  }
  for (int64_t r = 0; r < rows; ++r)
    finish_row<K>(product, activation, panel, row + r, sums + r * kvell::kPanel);
}

}  // namespace
