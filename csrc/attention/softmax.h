// exp, tanh and one span's step of the online softmax, over any kind of lanes.
#pragma once
#include <cstdint>

#include "task.h"

namespace {

// e^x for x <= 0, within 2 ulp; exactly 0 below -87.3 (so masked scores weigh nothing),
// exactly 1 at 0, and NaN stays NaN.
template <class L>
static inline __attribute__((always_inline)) typename L::Vec exp_of(typename L::Vec x) {
  const auto lowest = L::set(-87.3f);
  const auto clamped = L::where_less(x, lowest, lowest, x);
  const auto n = L::round(L::madd(clamped, L::set(1.44269504088896341f), L::zero()));
  auto r = L::madd(n, L::set(-0.693359375f), clamped);
  r = L::madd(n, L::set(2.12194440e-4f), r);
  auto y = L::set(1.9875691500e-4f);
  y = L::madd(y, r, L::set(1.3981999507e-3f));
  y = L::madd(y, r, L::set(8.3334519073e-3f));
  y = L::madd(y, r, L::set(4.1665795894e-2f));
  y = L::madd(y, r, L::set(1.6666665459e-1f));
  y = L::madd(y, r, L::set(5.0000001201e-1f));
  y = L::madd(y, L::madd(r, r, L::zero()), r);
  y = L::madd(y, L::set(1.0f), L::set(1.0f));
  return L::where_less(x, lowest, L::zero(), L::scale_by_power(y, n));
}

template <class L>
static inline __attribute__((always_inline)) float exp_of_one(float x) {
  float lanes[L::kWidth];
  L::store(lanes, exp_of<L>(L::set(x)));
  return lanes[0];
}

// tanh as a ratio of odd polynomials (the coefficients of Eigen's float tanh), few ulp.
template <class L>
static inline __attribute__((always_inline)) typename L::Vec tanh_of(typename L::Vec x) {
  // The limit first: of a limit and NaN, min and max return the second.
  x = L::max(L::set(-7.90531110763549805f), L::min(L::set(7.90531110763549805f), x));
  const auto square = L::madd(x, x, L::zero());
  auto above = L::set(-2.76076847742355e-16f);
  above = L::madd(above, square, L::set(2.00018790482477e-13f));
  above = L::madd(above, square, L::set(-8.60467152213735e-11f));
  above = L::madd(above, square, L::set(5.12229709037114e-08f));
  above = L::madd(above, square, L::set(1.48572235717979e-05f));
  above = L::madd(above, square, L::set(6.37261928875436e-04f));
  above = L::madd(above, square, L::set(4.89352455891786e-03f));
  above = L::madd(above, x, L::zero());
  auto below = L::set(1.19825839466702e-06f);
  below = L::madd(below, square, L::set(1.18534705686654e-04f));
  below = L::madd(below, square, L::set(2.26843463243900e-03f));
  below = L::madd(below, square, L::set(4.89352518554385e-03f));
  return L::div(above, below);
}

// Turns the dot products of one row with a span, in `scores`, into weights
// exp(score - maximum), and updates the row's maximum. Only positions [begin, end) of
// the span count; the others get weight 0. Returns the factor exp(old - new maximum)
// by which the row's sums so far must shrink.
template <class L>
static inline __attribute__((always_inline)) float weigh(float* scores, int begin, int end,
                                                         const kvell::Rule& rule, float& maximum) {
  constexpr int kVectors = kvell::kSpan / L::kWidth;
  typename L::Vec x[kVectors];
  auto largest = L::set(-__builtin_inff());
  for (int i = 0; i < kVectors; ++i) {
    x[i] = L::madd(L::load(scores + i * L::kWidth), L::set(rule.scale), L::zero());
    if (rule.softcap > 0.0f)
      x[i] = L::madd(tanh_of<L>(L::div(x[i], L::set(rule.softcap))), L::set(rule.softcap), L::zero());
    if (begin > 0 || end < kvell::kSpan)
      x[i] = L::keep(x[i], begin - i * L::kWidth, end - i * L::kWidth);
    largest = L::max(largest, x[i]);
  }
  const float before = maximum, here = L::largest(largest);
  maximum = here > before ? here : before;
  const bool nothing = maximum == -__builtin_inff();
  const auto shift = L::set(nothing ? 0.0f : -maximum);
  for (int i = 0; i < kVectors; ++i)
    L::store(scores + i * L::kWidth, exp_of<L>(L::add(x[i], shift)));
  return before == maximum ? 1.0f : exp_of_one<L>(before - maximum);
}

}  // namespace
