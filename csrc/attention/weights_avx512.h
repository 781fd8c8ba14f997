// Scores of up to 16 rows of a span become weights, rows side by side where each has one number.
#pragma once
#include "cpu/bfloat16.h"
#include "scores_avx512.h"

namespace {

constexpr int kWeightRows = 16, kPartsOfRow = 1 + kvell::kSpan / 32;

// Of a block, rounded to bf16: of every 32 positions number i beside number 16 + i, or each with a zero,
// in the odd place and in the even one.
struct BlockWeights {
  alignas(64) uint32_t pairs[kWeightRows][kvell::kSpan / 2];
  alignas(64) uint32_t even[kWeightRows][kvell::kSpan], odd[kWeightRows][kvell::kSpan];
};

// The same as short_exp, but for its NaN those of bf16 and of sums alone: the whole part of the power lies
// in the last bits of a large sum and goes from there into the exponent.
KVELL_INLINE __m512 weight_exp(__m512 x) {
  const __m512 large = _mm512_set1_ps(12582912.0f);  // 1.5 · 2^23
  const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ);
  const __m512 binary = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f));
  const __m512 sum = _mm512_add_ps(binary, large);
  const __m512 rest = _mm512_sub_ps(binary, _mm512_sub_ps(sum, large));
  const __m512 y = two_to(rest);
  return _mm512_castsi512_ps(_mm512_maskz_add_epi32(
      counts, _mm512_castps_si512(y), _mm512_slli_epi32(_mm512_castps_si512(sum), 23)));
}

KVELL_INLINE void keep_beside_zeros(__m512 weights, uint32_t* even, uint32_t* odd) {
  const __m512i wide = _mm512_cvtepu16_epi32(bf16_of(weights));
  _mm512_store_si512(even, wide);
  _mm512_store_si512(odd, _mm512_slli_epi32(wide, 16));
}

// Weights of 32 positions as pairs.
KVELL_INLINE __m512i as_pairs(__m512 first, __m512 second) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

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

// `counted`: which positions of the span each row reads. Updates maxima [rows]; factor[row] is by what a
// row's sums so far have to shrink. Calls between() kPartsOfRow times a row, about as long apart.
template <bool Paired, class Between>
static void weigh_block(float (*scores)[kvell::kSpan], int32_t rows, const kvell::Range* counted,
                        const kvell::Rule& rule, float* maximum, BlockWeights& weights, float* factor,
                        Between between) {
  const __m512 nothing = _mm512_set1_ps(-__builtin_inff());
  __m512 lanes[kWeightRows];
  float scales[kWeightRows];
  for (int32_t r = 0; r < kWeightRows; ++r) {
    if (r < rows) between();
    lanes[r] = r < rows ? largest_by_rule(scores[r], counted[r], rule, scales[r]) : nothing;
  }
  const __mmask16 held = Avx512Lanes::lanes(0, rows);
  alignas(64) float shifts[kWeightRows], shrinks[kWeightRows];
  shift_maxima(largest_of_each(lanes), held, maximum, shifts, shrinks);
  for (int32_t r = 0; r < rows; ++r) {
    factor[r] = shrinks[r];
    const __m512 scale = _mm512_set1_ps(scales[r]), shift = _mm512_set1_ps(shifts[r]);
    for (int i = 0; i < kvell::kSpan; i += 32) {
      between();
      const __m512 first =
          weight_exp(_mm512_fmadd_ps(_mm512_load_ps(scores[r] + i), scale, shift));
      const __m512 second =
          weight_exp(_mm512_fmadd_ps(_mm512_load_ps(scores[r] + i + 16), scale, shift));
      if constexpr (Paired) {
        _mm512_store_si512(weights.pairs[r] + i / 2, as_pairs(first, second));
      } else {
        keep_beside_zeros(first, weights.even[r] + i, weights.odd[r] + i);
        keep_beside_zeros(second, weights.even[r] + i + 16, weights.odd[r] + i + 16);
      }
    }
  }
}

}  // namespace
