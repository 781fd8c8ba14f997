// What softmax in bf16 makes of a span's scores, for few rows or many.
#pragma once
#include "lanes_avx512.h"

#include "softmax.h"

namespace {

// 2^x for x from -1/2 to 1/2, within 2^-13; exactly 1 at 0.
KVELL_INLINE __m512 two_to(__m512 x) {
  __m512 y = _mm512_set1_ps(0.0550089292f);
  y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(0.242210962f));
  y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(0.693282925f));
  return _mm512_fmadd_ps(y, x, _mm512_set1_ps(1.0f));
}

// e^x for x <= 0, within 2^-13, a sixteenth of what rounding to bf16 may leave out: exactly 1 at 0,
// exactly 0 below -87.3 (a number too small to be normal would cost a hundred others), and NaN stays
// NaN.
KVELL_INLINE __m512 short_exp(__m512 x) {
  const __m512 lowest = _mm512_set1_ps(-87.3f);
  const __mmask16 counts = _mm512_cmp_ps_mask(x, lowest, _CMP_NLT_UQ);
  const __m512 binary =
      _mm512_mul_ps(_mm512_max_ps(lowest, x), _mm512_set1_ps(1.44269504088896341f));
  const __m512 n = Avx512Lanes::round(binary), rest = _mm512_sub_ps(binary, n);
  return _mm512_maskz_scalef_ps(counts, two_to(rest), n);
}

// A row's scores times scale, capped, and -inf where it does not read; the lanes' largest.
KVELL_INLINE __m512 rule_row(float* scores, kvell::Range counted, const kvell::Rule& rule) {
  using L = Avx512Lanes;
  __m512 largest = _mm512_set1_ps(-__builtin_inff());
  for (int i = 0; i < kvell::kSpan; i += L::kWidth) {
    __m512 x = _mm512_mul_ps(_mm512_load_ps(scores + i), _mm512_set1_ps(rule.scale));
    if (rule.softcap > 0.0f)
      x = _mm512_mul_ps(tanh_of<L>(_mm512_div_ps(x, _mm512_set1_ps(rule.softcap))),
                        _mm512_set1_ps(rule.softcap));
    if (counted.begin > 0 || counted.end < kvell::kSpan)
      x = L::keep(x, counted.begin - i, counted.end - i);
    _mm512_store_ps(scores + i, x);
    largest = _mm512_max_ps(largest, x);
  }
  return largest;
}

// The largest lane of each of eight registers, in order, twice.
KVELL_INLINE __m512 largest_of_eight(const __m512 (&x)[8]) {
  __m512 halves[4], quarters[2];
  for (int i = 0; i < 4; ++i)  // rows i and i + 4: [i | i | i + 4 | i + 4] in quarters of registers
    halves[i] = _mm512_max_ps(_mm512_shuffle_f32x4(x[i], x[i + 4], 0x44),
                              _mm512_shuffle_f32x4(x[i], x[i + 4], 0xee));
  for (int i = 0; i < 2; ++i)  // rows i, i + 4, i + 2, i + 6, a quarter each
    quarters[i] = _mm512_max_ps(_mm512_shuffle_f32x4(halves[i], halves[i + 2], 0x88),
                                _mm512_shuffle_f32x4(halves[i], halves[i + 2], 0xdd));
  const __m512 both = _mm512_max_ps(_mm512_unpacklo_ps(quarters[0], quarters[1]),
                                    _mm512_unpackhi_ps(quarters[0], quarters[1]));
  const __m512 all = _mm512_max_ps(both, _mm512_shuffle_ps(both, both, 0x4e));
  const __m512i order = _mm512_setr_epi32(0, 1, 8, 9, 4, 5, 12, 13, 0, 1, 8, 9, 4, 5, 12, 13);
  return _mm512_permutexvar_ps(order, all);
}

// Updates the maxima of the rows in `held` by their largest scores of a span; by what each row's scores are
// shifted, and by what its sums so far shrink.
KVELL_INLINE void shift_maxima(__m512 largest, __mmask16 held, float* maximum, float (&by)[16],
                               float (&factor)[16]) {
  const __m512 nothing = _mm512_set1_ps(-__builtin_inff());
  const __m512 before = _mm512_mask_loadu_ps(nothing, held, maximum);
  const __m512 after = _mm512_max_ps(largest, before);  // if it is NaN, before
  const __mmask16 alike = _mm512_cmp_ps_mask(before, after, _CMP_EQ_OQ);
  const __mmask16 empty = _mm512_cmp_ps_mask(after, nothing, _CMP_EQ_OQ);
  _mm512_store_ps(by, _mm512_maskz_sub_ps(static_cast<__mmask16>(~empty), _mm512_setzero_ps(), after));
  _mm512_store_ps(factor, _mm512_mask_mov_ps(exp_of<Avx512Lanes>(_mm512_sub_ps(before, after)), alike,
                                             _mm512_set1_ps(1.0f)));
  _mm512_mask_storeu_ps(maximum, held, after);
}

// What a row's scores are still to be multiplied by, then shifted by, and by what its sums so far shrink.
struct Shift {
  float scale, by, factor;
};

// A row's largest score by the rule, in lanes. Where all are read and none is capped, scores stay as they
// are, to be scaled as they are shifted.
KVELL_INLINE __m512 largest_by_rule(float* scores, kvell::Range counted, const kvell::Rule& rule,
                                    float& scale) {
  if (counted.begin > 0 || counted.end < kvell::kSpan || rule.softcap > 0.0f || !(rule.scale > 0.0f)) {
    scale = 1.0f;
    return rule_row(scores, counted, rule);
  }
  scale = rule.scale;
  __m512 largest = _mm512_load_ps(scores);
  for (int i = 16; i < kvell::kSpan; i += 16) largest = _mm512_max_ps(largest, _mm512_load_ps(scores + i));
  return _mm512_mul_ps(largest, _mm512_set1_ps(rule.scale));
}

// Updates R rows' maxima by a span's scores, of which each row reads those `counted`.
template <int R>
KVELL_INLINE void shift_rows(float (*scores)[kvell::kSpan], const kvell::Range* counted,
                             const kvell::Rule& rule, float* maximum, Shift* shifts) {
  static_assert(R <= 8);
  const __m512 nothing = _mm512_set1_ps(-__builtin_inff());
  __m512 lanes[8];
  for (int r = 0; r < 8; ++r)
    lanes[r] = r < R ? largest_by_rule(scores[r], counted[r], rule, shifts[r].scale) : nothing;
  alignas(64) float by[16], factor[16];
  shift_maxima(largest_of_eight(lanes), (1u << R) - 1, maximum, by, factor);
  for (int r = 0; r < R; ++r) {
    shifts[r].by = by[r];
    shifts[r].factor = factor[r];
  }
}

}  // namespace
