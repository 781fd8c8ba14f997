// Weights of eight and four bits times rows of bf16, in whole numbers of 16 bits.
//
//   32 numbers of a row:  x = power · w, w whole and below 2^15; a power of two by the largest x
//   sum over a group:     power · (scale · Σ w q + minimum · Σ w)
//
// An instruction multiplies and adds a pair in each lane, as bf16's does, but weights become its
// items by one or two instructions, a third of what makes them bf16, and the next one of a sum need
// not wait: Σ w q is exact in 32 bits, so inside a group the order is free and few rows keep several
// sums. Groups follow each other in the order of the row. A number keeps all bits of bf16 down to
// 1/128 of the largest of its 32; below that it is rounded to 2^-15 of the largest.
#pragma once
#include <cstring>
#include <limits>

#include "grouped.h"
#include "grouped_avx512.h"

namespace {

constexpr int64_t kGroupPairs = kvell::kGroup / 2;

KVELL_INLINE float float_of_bits(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Exponent of the largest of 32 bf16, as its bits have it; 255 of infinities and NaN.
KVELL_INLINE int32_t largest_exponent(__m512i numbers) {
  const __m512i sizes = _mm512_and_si512(numbers, _mm512_set1_epi16(0x7fff));
  const __m256i half =
      _mm256_max_epu16(_mm512_castsi512_si256(sizes), _mm512_extracti64x4_epi64(sizes, 1));
  const __m128i part =
      _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(part, _mm_set1_epi32(-1)));
  return (~_mm_cvtsi128_si32(least) & 0xffff) >> 7;
}

// Pairs of whole numbers, and the power that makes them what they were: NaN, if one was no number.
struct WholeGroup {
  __m512i pairs;
  float power;

  KVELL_INLINE WholeGroup of(__m512i numbers) {
    constexpr int32_t kLeast = 15;  // of exponents whose power is a normal number
    const int32_t found = largest_exponent(numbers), exponent = found < kLeast ? kLeast : found;
    const __m512 factor = _mm512_set1_ps(float_of_bits((268 - exponent) << 23));
    const __m512i low = _mm512_slli_epi32(numbers, 16);
    const __m512i high = _mm512_and_si512(numbers, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
    const __m512i lows = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(low), factor));
    const __m512i highs = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(high), factor));
    const float power = float_of_bits((exponent - 14) << 23);
    return {_mm512_mask_blend_epi16(0xaaaaaaaau, lows, _mm512_slli_epi32(highs, 16)),
            found == 255 ? std::numeric_limits<float>::quiet_NaN() : power};
  }

  // Of the numbers that they were.
  KVELL_INLINE float sum(const WholeGroup& group) {
    const __m512i ones = _mm512_set1_epi16(1);
    const __m512i sums = _mm512_dpwssd_epi32(_mm512_setzero_si512(), group.pairs, ones);
    return static_cast<float>(_mm512_reduce_add_epi32(sums)) * group.power;
  }
};

// A thread's own copy of some rows: pairs [groups, rows, 16], powers and sums [groups, rows].
class WholeRows {
 public:
  Inputs take(const Product& product, int64_t row_begin, int64_t rows) {
    const kvell::Matrix& matrix = *product.matrix;
    uint32_t* const pairs = reinterpret_cast<uint32_t*>(pairs_.of(rows * matrix.groups * 64));
    float* const powers = reinterpret_cast<float*>(powers_.of(rows * matrix.groups * 4));
    float* const sums = reinterpret_cast<float*>(sums_.of(rows * matrix.groups * 4));
    for (int64_t row = 0; row < rows; ++row) {
      const uint32_t* x = product.x + (row_begin + row) * product.x_stride;
      for (int64_t g = 0, at = row; g < matrix.groups; ++g, at += rows) {
        const int left = static_cast<int>(std::min(kGroupPairs, matrix.steps - g * kGroupPairs));
        const WholeGroup made = WholeGroup::of(
            _mm512_maskz_loadu_epi32(Avx512Lanes::lanes(0, left), x + g * kGroupPairs));
        _mm512_store_si512(pairs + at * kGroupPairs, made.pairs);
        powers[at] = made.power;
        if (matrix.form == kvell::Form::int4) sums[at] = WholeGroup::sum(made);
      }
    }
    return {pairs, rows * kGroupPairs, sums, powers, rows};
  }

 private:
  AlignedBytes pairs_, powers_, sums_;
};

template <kvell::Form F>
struct WholeWeights {
  static constexpr int64_t kBytes = kvell::group_bytes(F);
  static constexpr int kColumns = 2, kRows = 12;
  static constexpr bool kInParts = false;

  static int64_t most_rows(int64_t) { return kRows; }
  static const uint8_t* unpacked(const uint8_t*, int64_t, int64_t) { return nullptr; }

  static Inputs inputs(const Product& product, int64_t row_begin, int64_t row_end, bool again) {
    thread_local WholeRows rows;
    thread_local Inputs made;
    if (!again) made = rows.take(product, row_begin, row_end - row_begin);
    return made;
  }

  static Inputs skip(const Inputs& inputs, int64_t rows) {
    return {inputs.items + rows * kGroupPairs, inputs.stride, inputs.sums + rows,
            inputs.powers + rows, inputs.sums_stride};
  }

  static void pass(const Tile& tile, int64_t rows, float* to) {
    pass_of<WholeWeights, kRows>(tile, rows, to);
  }

  template <int R>
  static void sums(const Tile& tile, float* to) {
    if constexpr (R <= kKeptRows) return kept_sums<R>(tile, to);
    std::memset(to, 0, R * kPanel * sizeof(float));
    each_group<R>(tile, [&](int r, int c, auto add) {
      float* at = to + r * kPanel + c * 16;
      _mm512_store_ps(at, add(_mm512_load_ps(at)));
    });
  }

 private:
  static constexpr int kKeptRows = 6;  // whose totals stay in registers

  template <int R>
  static void kept_sums(const Tile& tile, float* to) {
    __m512 total[R][kColumns];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < kColumns; ++c) total[r][c] = _mm512_setzero_ps();
    each_group<R>(tile, [&](int r, int c, auto add) { total[r][c] = add(total[r][c]); });
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < kColumns; ++c) _mm512_store_ps(to + r * kPanel + c * 16, total[r][c]);
  }

  // Calls change(r, c, add) for every total, once a group: add(total) is what it becomes.
  template <int R, class Change>
  KVELL_INLINE void each_group(const Tile& tile, Change change) {
    const uint8_t* group = tile.panel;
    for (int64_t index = 0; index < tile.groups; ++index, group += kBytes) {
      __m512i sums[R][kColumns];
      sum_group<R>(sums, tile, group, index);
      const float* const powers = tile.x.powers + index * tile.x.sums_stride;
      const float* const of_x = tile.x.sums + index * tile.x.sums_stride;
      for (int c = 0; c < kColumns; ++c) {
        const __m512 scale = halves_of(group + c * 32);
        const __m512 minimum = F == kvell::Form::int4 ? halves_of(group + kPanel * 2 + c * 32) : scale;
        for (int r = 0; r < R; ++r)
          change(r, c, [&](__m512 total) __attribute__((always_inline)) {
            const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r][c]), scale);
            total = _mm512_fmadd_ps(scaled, _mm512_set1_ps(powers[r]), total);
            if constexpr (F == kvell::Form::int4)
              total = _mm512_fmadd_ps(minimum, _mm512_set1_ps(of_x[r]), total);
            return total;
          });
      }
      asm volatile("" ::: "memory");  // totals stay in one place: gcc keeps a second copy of each
    }
  }

  // Chains of a few rows take turns, so that each instruction need not wait for the one before.
  template <int R>
  KVELL_INLINE void sum_group(__m512i (&sums)[R][kColumns], const Tile& tile, const uint8_t* group,
                              int64_t index) {
    constexpr int kChains = R == 1 ? 4 : R <= 3 ? 2 : 1, kParts = 4;
    const uint32_t* x = tile.x.items + index * tile.x.stride;
    const uint8_t* const quants = group + kvell::scales_bytes(F);
    using Later = GroupFetch<kBytes>;
    const Later later = Later::at(tile.fetch, group, index);
    __m512i acc[kChains][R][kColumns];
    for (auto& chain : acc)
      for (auto& row : chain)
        for (auto& sum : row) sum = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      Later::lines(later, part, kParts);
#pragma GCC unroll 4
      for (int step = part * 4; step < part * 4 + 4; ++step) {
        __m512i made[kColumns];
        for (int c = 0; c < kColumns; ++c) made[c] = pairs_of(quants, step, c);
        for (int r = 0; r < R; ++r) {
          const __m512i pair = _mm512_set1_epi32(static_cast<int>(x[r * kGroupPairs + step]));
          for (int c = 0; c < kColumns; ++c)
            acc[step % kChains][r][c] = _mm512_dpwssd_epi32(acc[step % kChains][r][c], pair, made[c]);
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < kColumns; ++c) {
        sums[r][c] = acc[0][r][c];
        for (int chain = 1; chain < kChains; ++chain)
          sums[r][c] = _mm512_add_epi32(sums[r][c], acc[chain][r][c]);
      }
  }

  // Of one step: int4 have four steps' bits in one word.
  KVELL_INLINE __m512i pairs_of(const uint8_t* quants, int step, int c) {
    if constexpr (F == kvell::Form::int8)
      return _mm512_cvtepi8_epi16(
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(quants + step * 64 + c * 32)));
    const __m512i words = _mm512_loadu_si512(quants + step / 4 * 128 + c * 64);
    const auto count = static_cast<unsigned>(step % 4 * 4);
    return _mm512_and_si512(_mm512_srli_epi16(words, count), _mm512_set1_epi16(15));
  }
};

}  // namespace
