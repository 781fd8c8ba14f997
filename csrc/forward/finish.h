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

// [gates 16 | ups 16] → 16 elements.
template <class K>
KVELL_INLINE void finish_gate(const kvell::Finish& finish, Activation activation, int64_t at,
                              float* sums) {
  using L = typename K::Lanes;
  constexpr int kHalf = kvell::kPanel / 2;
  for (int i = 0; i < kHalf; i += L::kWidth)
    L::store(sums + i, times<L>(activate<L>(activation, L::load(sums + i)), L::load(sums + kHalf + i)));
  K::store_elements(static_cast<typename K::Element*>(finish.y) + at, sums, kHalf);
}

template <class L>
KVELL_INLINE void finish_whole(const kvell::Finish& finish, float* y, const float* sums) {
  if (finish.goal == Goal::store) {
    for (int i = 0; i < kvell::kPanel; i += L::kWidth) L::store(y + i, L::load(sums + i));
  } else {
    const auto factor = L::set(finish.factor);
    for (int i = 0; i < kvell::kPanel; i += L::kWidth)
      L::store(y + i, L::madd(factor, L::load(sums + i), L::load(y + i)));
  }
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
    return finish_gate<K>(finish, activation, row * finish.y_stride + column / 2, sums);
  float* y = static_cast<float*>(finish.y) + row * finish.y_stride + column;
  const int64_t count = matrix.out - column < kvell::kPanel ? matrix.out - column : kvell::kPanel;
  if (finish.softcap > 0.0f) cap<L>(sums, finish.softcap);
  if (count == kvell::kPanel) return finish_whole<L>(finish, y, sums);
  if (finish.goal == Goal::store)
    for (int64_t i = 0; i < count; ++i) y[i] = sums[i];
  else
    for (int64_t i = 0; i < count; ++i) y[i] += finish.factor * sums[i];
}

}  // namespace
