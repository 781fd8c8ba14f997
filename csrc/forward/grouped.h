// Weights of eight or four bits, multiplied as the whole numbers that they are.
//
//   sum over a row = Σ over groups (scale · Σ x q  +  minimum · Σ x)
//
// (Rows of bf16 on AVX-512 go through whole_avx512.h, in whole numbers themselves.)
// Whole numbers of eight bits are exact as bf16, so a group costs what plain weights do, and its
// scales are used once. The order of sums depends on the row's length alone, as everywhere.
//
// K says how q is unpacked: K::int8 and K::int4 make the items of one step for register c,
// K::store_items puts them where K::load finds them, K::scales_at reads a register of scales.
// Layouts are those of matrix.h. Rows of one pass multiply items as they are made; for more, a panel
// is unpacked once. It is the same arithmetic in the same order.
#pragma once
#include <cstring>

#include "aligned.h"
#include "product.h"

namespace {

// Lines of a later group, fetched a few at a time between the steps of this one.
template <int64_t GroupBytes>
struct GroupFetch {
  const uint8_t *ahead, *near;  // or null

  // Groups below `split` fetch further down this panel, the others from the next one; with
  // several passes over a panel, the first fetches all.
  KVELL_INLINE GroupFetch at(const Fetch& fetch, const uint8_t* group, int64_t index) {
    const uint8_t* from = index < fetch.split ? fetch.first : fetch.second;
    if (fetch.lines == 0 || !from) return {nullptr, nullptr};
    return {from + index * GroupBytes, fetch.lines == 2 ? group + kNearBytes : nullptr};
  }

  // Part `part` of `parts`.
  KVELL_INLINE void lines(const GroupFetch& fetch, int64_t part, int64_t parts) {
    constexpr int64_t kLines = GroupBytes / 64;
    const int64_t begin = kLines * part / parts, end = kLines * (part + 1) / parts;
    for (int64_t i = begin; fetch.ahead && i < end; ++i) {
      __builtin_prefetch(fetch.ahead + i * 64, 0, 2);
      __builtin_prefetch(fetch.ahead + i * 64 - kAgainBytes, 0, 2);
    }
    for (int64_t i = begin; fetch.near && i < end; ++i) __builtin_prefetch(fetch.near + i * 64, 0, 3);
  }
};

template <class K, kvell::Form F>
struct GroupedWeights {
  static constexpr int C = kPanel / K::Lanes::kWidth;
  static constexpr int64_t kSteps = kvell::kGroup / kPerItem<K>, kBytes = kvell::group_bytes(F);
  static constexpr int kRows = K::kRows;
  static constexpr bool kInParts = false;

  static void pass(const Tile& tile, int64_t rows, float* to) {
    pass_of<GroupedWeights, kRows>(tile, rows, to);
  }

  template <int R>
  static void sums(const Tile& tile, float* to) {
    if constexpr (R <= K::kUnpackedRows)
      if (tile.items) return unpacked_sums<R>(tile, to);
    using L = typename K::Lanes;
    std::memset(to, 0, R * kPanel * sizeof(float));
    const uint8_t* group = tile.panel;
    for (int64_t begin = 0; begin < tile.steps; begin += kSteps, group += kBytes) {
      typename L::Vec acc[R][C];
      sum_group<R>(acc, tile, group, begin, [&](int64_t step, int c) {
        return items(group + kvell::scales_bytes(F), step, c);
      });
      for (int c = 0; c < C; ++c) {
        const Scales scales = scales_of(group, c);
        for (int r = 0; r < R; ++r) {
          float* at = to + r * kPanel + c * L::kWidth;
          L::store(at, with_group(L::load(at), acc[r][c], scales, tile, begin / kSteps, r));
        }
      }
      asm volatile("" ::: "memory");  // totals stay in one place: gcc keeps a second copy of each
    }
  }

  // Rows of one pass.
  static int64_t most_rows(int64_t rows) {
    return rows < kRowsToUnpack ? kRows : K::kUnpackedRows;
  }

  // The items of a panel, if so many rows are worth it; good until the thread's next panel.
  static const uint8_t* unpacked(const uint8_t* panel, int64_t steps, int64_t rows) {
    if (rows < kRowsToUnpack) return nullptr;
    thread_local AlignedBytes memory;
    uint8_t* const items_begin = memory.of(steps * kvell::kStepBytes);
    uint8_t* to = items_begin;
    for (int64_t begin = 0; begin < steps; begin += kSteps, panel += kBytes)
      for (int64_t step = 0; step < std::min(kSteps, steps - begin); ++step, to += kvell::kStepBytes)
        for (int c = 0; c < C; ++c)
          K::store_items(to + c * K::Lanes::kWidth * 4, items(panel + kvell::scales_bytes(F), step, c));
    return items_begin;
  }

  // With Σ x of every group of some rows, where weights have minima: [rows, groups].
  static Inputs inputs(const Product& product, int64_t row_begin, int64_t row_end, bool again) {
    thread_local AlignedBytes memory;
    const int64_t groups = product.matrix->groups, steps = product.matrix->steps;
    const uint32_t* const x = product.x + row_begin * product.x_stride;
    if constexpr (F != kvell::Form::int4) return {x, product.x_stride, nullptr, nullptr, 0};
    const int64_t count = (row_end - row_begin) * groups;
    float* const sums = reinterpret_cast<float*>(memory.of(count * 4));
    for (int64_t at = 0; !again && at < count; ++at)
      sums[at] = sum_of(x + at / groups * product.x_stride + at % groups * kSteps,
                        std::min(kSteps, steps - at % groups * kSteps));
    return {x, product.x_stride, sums, nullptr, groups};
  }

  static Inputs skip(const Inputs& inputs, int64_t rows) {
    return {inputs.items + rows * inputs.stride, inputs.stride, inputs.sums + rows * inputs.sums_stride,
            nullptr, inputs.sums_stride};
  }

 private:
  static constexpr int64_t kRowsToUnpack = 13;  // below, one pass is enough, and making items hides behind it

  KVELL_INLINE typename K::Items items(const uint8_t* quants, int64_t step, int c) {
    if constexpr (F == kvell::Form::int8) return K::int8(quants, step, c);
    return K::int4(quants, step, c);
  }

  // The same of a panel that is unpacked; the rows are few enough for totals in registers.
  template <int R>
  static void unpacked_sums(const Tile& tile, float* to) {
    using L = typename K::Lanes;
    typename L::Vec total[R][C];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) total[r][c] = L::zero();
    const uint8_t* group = tile.panel;
    for (int64_t begin = 0; begin < tile.steps; begin += kSteps, group += kBytes) {
      typename L::Vec acc[R][C];
      const uint8_t* from = tile.items + begin * kvell::kStepBytes;
      sum_group<R>(acc, tile, group, begin, [&](int64_t step, int c) {
        return K::load(from + step * kvell::kStepBytes + c * L::kWidth * 4);
      });
      for (int c = 0; c < C; ++c) {
        const Scales scales = scales_of(group, c);
        for (int r = 0; r < R; ++r)
          total[r][c] = with_group(total[r][c], acc[r][c], scales, tile, begin / kSteps, r);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) L::store(to + r * kPanel + c * L::kWidth, total[r][c]);
  }

  template <int R, class Make>
  KVELL_INLINE void sum_group(typename K::Lanes::Vec (&acc)[R][C], const Tile& tile,
                              const uint8_t* group, int64_t begin, Make make) {
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) acc[r][c] = K::Lanes::zero();
    const int64_t count = std::min(kSteps, tile.steps - begin);
    using Later = GroupFetch<kBytes>;
    const Later later = Later::at(tile.fetch, group, begin / kSteps);
    for (int64_t step = 0; step < count; ++step) {
      Later::lines(later, step, kSteps);
      typename K::Items made[C];
      for (int c = 0; c < C; ++c) made[c] = make(step, c);
      for (int r = 0; r < R; ++r) {
        const auto item = K::broadcast(tile.x.items[r * tile.x.stride + begin + step]);
        for (int c = 0; c < C; ++c) acc[r][c] = K::madd(acc[r][c], item, made[c]);
      }
    }
  }

  struct Scales {
    typename K::Lanes::Vec scale, minimum;
  };

  KVELL_INLINE Scales scales_of(const uint8_t* group, int c) {
    const uint8_t* at = group + c * K::Lanes::kWidth * 2;
    if constexpr (F == kvell::Form::int4) return {K::scales_at(at), K::scales_at(at + kPanel * 2)};
    return {K::scales_at(at), K::Lanes::zero()};
  }

  // A total with one group's sum: times its scale, and the minimum times the row's own sum.
  KVELL_INLINE typename K::Lanes::Vec with_group(typename K::Lanes::Vec total,
                                                 typename K::Lanes::Vec sum, const Scales& scales,
                                                 const Tile& tile, int64_t index, int r) {
    using L = typename K::Lanes;
    total = L::madd(sum, scales.scale, total);
    if constexpr (F == kvell::Form::int4)
      total = L::madd(L::set(tile.x.sums[r * tile.x.sums_stride + index]), scales.minimum, total);
    return total;
  }

  static float sum_of(const uint32_t* x, int64_t count) {
    using L = typename K::Lanes;
    alignas(64) uint8_t rest[kSteps * 4];  // bytes: they are read as floats too
    const uint8_t* items = reinterpret_cast<const uint8_t*>(x);
    if (count < kSteps) {
      std::memset(rest, 0, sizeof(rest));
      std::memcpy(rest, x, count * 4);
      items = rest;
    }
    auto sum = L::zero();
    const auto ones = K::broadcast(K::kOnes);
    for (int64_t i = 0; i < kSteps; i += L::kWidth)
      sum = K::madd(sum, K::load(items + i * 4), ones);
    return L::sum(sum);
  }
};

}  // namespace
