// Weights of eight or four bits, multiplied as the whole numbers that they are.
//
//   sum over a row = Σ over groups (scale · Σ x q  +  minimum · Σ x)
//
// Whole numbers of eight bits are exact as bf16, so a group costs what plain weights do, and its
// scales are used once. The order of sums depends on the row's length alone, as everywhere.
//
// K says how q is unpacked: K::eights and K::fours make the items of one step for register c,
// K::scales_at reads a register of scales. Layouts are those of matrix.h.
#pragma once
#include <cstring>
#include <vector>

#include "product.h"

namespace {

// Lines of a later group, fetched one with each step.
struct GroupFetch {
  const uint8_t *ahead, *near;  // near: or null
  int64_t lines;

  KVELL_INLINE void line(const GroupFetch& fetch, int64_t index) {
    if (index >= fetch.lines) return;
    __builtin_prefetch(fetch.ahead + index * 64, 0, 2);
    if (fetch.near) __builtin_prefetch(fetch.near + index * 64, 0, 3);
  }
};

template <class K, kvell::Form F>
struct GroupedWeights {
  static constexpr int C = kPanel / K::Lanes::kWidth;
  static constexpr int64_t kSteps = kvell::kGroup / kPerItem<K>, kBytes = kvell::group_bytes(F);

  template <int R>
  static void sums(const Tile& tile, float* to) {
    using L = typename K::Lanes;
    std::memset(to, 0, R * kPanel * sizeof(float));
    const uint8_t* group = tile.panel;
    for (int64_t begin = 0; begin < tile.steps; begin += kSteps, group += kBytes) {
      typename L::Vec acc[R][C];
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) acc[r][c] = L::zero();
      const int64_t count = std::min(kSteps, tile.steps - begin);
      sum_group<R>(acc, tile, group, begin, count);
      for (int c = 0; c < C; ++c) finish_group<R>(acc, tile, group, begin / kSteps, c, to);
      asm volatile("" ::: "memory");  // totals stay in one place: gcc keeps a second copy of each
    }
  }

  // Σ x of every group of some rows: [rows, groups].
  static const float* row_sums(const Product& product, int64_t row_begin, int64_t row_end) {
    if (F == kvell::Form::eights) return nullptr;
    thread_local std::vector<float> sums;
    const int64_t groups = product.matrix->groups, steps = product.matrix->steps;
    sums.resize((row_end - row_begin) * groups);
    for (int64_t row = row_begin; row < row_end; ++row)
      for (int64_t g = 0; g < groups; ++g)
        sums[(row - row_begin) * groups + g] =
            sum_of(product.x + row * product.x_stride + g * kSteps, std::min(kSteps, steps - g * kSteps));
    return sums.data();
  }

 private:
  KVELL_INLINE typename K::Items items(const uint8_t* quants, int64_t step, int c) {
    if constexpr (F == kvell::Form::eights) return K::eights(quants, step, c);
    return K::fours(quants, step, c);
  }

  template <int R>
  KVELL_INLINE void sum_group(typename K::Lanes::Vec (&acc)[R][C], const Tile& tile,
                              const uint8_t* group, int64_t begin, int64_t count) {
    const GroupFetch fetch = fetch_at(tile.fetch, group, begin / kSteps);
    for (int64_t index = kSteps; index < fetch.lines; ++index) GroupFetch::line(fetch, index);
    const uint8_t* quants = group + kvell::scales_bytes(F);
    for (int64_t step = 0; step < count; ++step) {
      GroupFetch::line(fetch, step);
      typename K::Items made[C];
      for (int c = 0; c < C; ++c) made[c] = items(quants, step, c);
      for (int r = 0; r < R; ++r) {
        const auto item = K::broadcast(tile.x[r * tile.x_stride + begin + step]);
        for (int c = 0; c < C; ++c) acc[r][c] = K::madd(acc[r][c], item, made[c]);
      }
    }
  }

  template <int R>
  KVELL_INLINE void finish_group(typename K::Lanes::Vec (&acc)[R][C], const Tile& tile,
                                 const uint8_t* group, int64_t index, int c, float* to) {
    using L = typename K::Lanes;
    const auto scale = K::scales_at(group + c * L::kWidth * 2);
    for (int r = 0; r < R; ++r) {
      float* at = to + r * kPanel + c * L::kWidth;
      auto total = L::madd(acc[r][c], scale, L::load(at));
      if constexpr (F == kvell::Form::fours) {
        const auto minimum = K::scales_at(group + (kPanel + c * L::kWidth) * 2);
        total = L::madd(L::set(tile.row_sums[r * tile.groups + index]), minimum, total);
      }
      L::store(at, total);
    }
  }

  static float sum_of(const uint32_t* x, int64_t count) {
    using L = typename K::Lanes;
    alignas(64) uint8_t items[kSteps * 4] = {};  // bytes: they are read as floats too
    std::memcpy(items, x, count * 4);
    auto sum = L::zero();
    const auto ones = K::broadcast(K::kOnes);
    for (int64_t i = 0; i < kSteps; i += L::kWidth)
      sum = K::madd(sum, K::load(items + i * 4), ones);
    return L::sum(sum);
  }

  // Groups below `split` fetch further down this panel, the others from the next one; with
  // several passes over a panel, the first fetches all.
  KVELL_INLINE GroupFetch fetch_at(const Fetch& fetch, const uint8_t* group, int64_t index) {
    const uint8_t* from = index < fetch.split ? fetch.first : fetch.second;
    if (fetch.lines == 0 || !from) return {nullptr, nullptr, 0};
    return {from + index * kBytes, fetch.lines == 2 ? group + kNearBytes : nullptr, kBytes / 64};
  }
};

}  // namespace
