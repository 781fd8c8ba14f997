// Scores of up to 16 rows of a span become weights, rows side by side where each has one number.
#pragma once
#include "scores_avx512.h"

namespace {

constexpr int kWeightRows = 16;

// Of a block, rounded to bf16, each with a zero: in the odd place, and in the even one.
struct BlockWeights {
  alignas(64) uint32_t even[kWeightRows][kvell::kSpan], odd[kWeightRows][kvell::kSpan];
};

// The largest lane of each of sixteen registers, as one.
KVELL_INLINE __m512 largest_of_each(__m512 (&x)[kWeightRows]) {
  __m512 halves[8], quarters[4];
  for (int i = 0; i < 8; ++i)  // rows i and i + 8: [i | i | i + 8 | i + 8] in quarters of registers
    halves[i] = _mm512_max_ps(_mm512_shuffle_f32x4(x[i], x[i + 8], 0x44),
                              _mm512_shuffle_f32x4(x[i], x[i + 8], 0xee));
  for (int i = 0; i < 4; ++i)  // rows i, i + 8, i + 4, i + 12, a quarter each
    quarters[i] = _mm512_max_ps(_mm512_shuffle_f32x4(halves[i], halves[i + 4], 0x88),
                                _mm512_shuffle_f32x4(halves[i], halves[i + 4], 0xdd));
  const __m512 early = _mm512_max_ps(_mm512_unpacklo_ps(quarters[0], quarters[1]),
                                     _mm512_unpackhi_ps(quarters[0], quarters[1]));
  const __m512 late = _mm512_max_ps(_mm512_unpacklo_ps(quarters[2], quarters[3]),
                                    _mm512_unpackhi_ps(quarters[2], quarters[3]));
  const __m512 all = _mm512_max_ps(_mm512_shuffle_ps(early, late, 0x44),
                                   _mm512_shuffle_ps(early, late, 0xee));
  const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15);
  return _mm512_permutexvar_ps(order, all);
}

// `counted`: which positions of the span each row reads. Updates maxima [rows] and lanes of sums
// [rows, 16] (the denominator sums what was rounded, so weights add up to 1); factor[row] is by what
// a row's sums so far had to shrink.
static void weigh_block(float (*scores)[kvell::kSpan], int32_t rows, const kvell::Range* counted,
                        const kvell::Rule& rule, float* maximum, float* sums, BlockWeights& weights,
                        float* factor) {
  const __m512 nothing = _mm512_set1_ps(-__builtin_inff());
  __m512 lanes[kWeightRows];
  for (int32_t r = 0; r < kWeightRows; ++r)
    lanes[r] = r < rows ? rule_row(scores[r], counted[r], rule) : nothing;
  const __mmask16 held = Avx512Lanes::lanes(0, rows);
  alignas(64) float shifts[kWeightRows], shrinks[kWeightRows];
  shift_maxima(largest_of_each(lanes), held, maximum, shifts, shrinks);
  for (int32_t r = 0; r < rows; ++r) {
    factor[r] = shrinks[r];
    const __m512 shift = _mm512_set1_ps(shifts[r]);
    __m512 sum = _mm512_mul_ps(_mm512_load_ps(sums + r * 16), _mm512_set1_ps(shrinks[r]));
    for (int i = 0; i < kvell::kSpan; i += 16) {
      const __m512 weight = short_exp(_mm512_add_ps(_mm512_load_ps(scores[r] + i), shift));
      const __m512i even = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(weight));
      const __m512i odd = _mm512_slli_epi32(even, 16);
      _mm512_store_si512(weights.even[r] + i, even);
      _mm512_store_si512(weights.odd[r] + i, odd);
      sum = _mm512_add_ps(sum, _mm512_castsi512_ps(odd));
    }
    _mm512_store_ps(sums + r * 16, sum);
  }
}

}  // namespace
