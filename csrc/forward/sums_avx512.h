// Eight registers added up side by side: a third of what one after the other takes.
#pragma once
#include <immintrin.h>

#include "attention/lanes_avx512.h"

namespace {

// Lanes i and i + 8 first, then those 4, 2 and 1 apart, as Avx512Lanes::sum has it.
KVELL_INLINE void sums_of_eight(const __m512* x, float* to) {
  __m512 halves[4], quarters[2];
  for (int i = 0; i < 4; ++i)  // [x_2i folded | x_2i+1 folded]
    halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0x44),
                              _mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0xee));
  for (int i = 0; i < 2; ++i)  // four lanes of each of four
    quarters[i] = _mm512_add_ps(_mm512_shuffle_f32x4(halves[2 * i], halves[2 * i + 1], 0x88),
                                _mm512_shuffle_f32x4(halves[2 * i], halves[2 * i + 1], 0xdd));
  const __m512 pairs = _mm512_add_ps(_mm512_shuffle_ps(quarters[0], quarters[1], 0x44),
                                     _mm512_shuffle_ps(quarters[0], quarters[1], 0xee));
  const __m512 sums = _mm512_add_ps(pairs, _mm512_shuffle_ps(pairs, pairs, 0xb1));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm256_storeu_ps(to, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, sums)));
}

}  // namespace
