// What a mixer's heads give, times silu of their gates, with a norm before or after that or none.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "finish.h"
#include "kernels.h"

namespace {

constexpr int64_t kGated = 64;  // numbers at a time

// y and the gates' silu of numbers [at, at + count), filled up with zeros.
template <class L>
void gated_part(const kvell::Gated& made, int64_t at, int64_t count, float* y, float* gates) {
  std::memset(y, 0, kGated * 4);
  std::memset(gates, 0, kGated * 4);
  std::memcpy(y, made.y + at, count * 4);
  std::memcpy(gates, made.gates + at, count * 4);
  for (int64_t i = 0; i < kGated; i += L::kWidth) L::store(gates + i, silu_of<L>(L::load(gates + i)));
}

// 1/√(mean of squares + ε) of what the norm reads: y, or y times its gates.
template <class L>
float norm_scale(const kvell::Gated& made, int64_t begin, int64_t size) {
  alignas(64) float y[kGated], gates[kGated];
  auto sum = L::zero();
  for (int64_t i = 0; i < size; i += kGated) {
    gated_part<L>(made, begin + i, std::min(kGated, size - i), y, gates);
    for (int64_t j = 0; j < kGated; j += L::kWidth) {
      auto x = L::load(y + j);
      if (!made.norm_before_gate) x = times<L>(x, L::load(gates + j));
      sum = L::madd(x, x, sum);
    }
  }
  return 1.0f / std::sqrt(L::sum(sum) / static_cast<float>(size) + made.norm.epsilon);
}

template <class K>
void gate_row(const kvell::Gated& made) {
  using L = typename K::Lanes;
  alignas(64) float y[kGated], gates[kGated];
  auto* to = static_cast<typename K::Element*>(made.to);
  const int64_t size = made.size / made.groups;
  for (int64_t begin = 0; begin < made.size; begin += size) {
    const float scale = made.norm ? norm_scale<L>(made, begin, size) : 1.0f;
    for (int64_t i = 0; i < size; i += kGated) {
      const int64_t at = begin + i, count = std::min(kGated, size - i);
      gated_part<L>(made, at, count, y, gates);
      for (int64_t j = 0; j < count; ++j) y[j] *= gates[j];
      if (made.norm)
        for (int64_t j = 0; j < count; ++j) y[j] *= scale * made.norm.weight[at + j];
      K::store_elements(to + at, y, count);
    }
  }
}

}  // namespace
