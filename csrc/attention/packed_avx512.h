// Kernels whose item is one float, over any kind of pool: keys are transposed in registers,
// quantised rows multiplied by their scale as they are loaded.
#pragma once
#include "lanes_avx512.h"
#include "transpose_avx512.h"

#include "floats.h"

namespace {

// Elements [d, d + 16) of a row as floats, zero where the mask is.
KVELL_INLINE __m512 load_floats(Float32, const uint8_t* row, int32_t d, __mmask16 mask) {
  return _mm512_maskz_loadu_ps(mask, row + d * 4);
}

KVELL_INLINE __m512 load_floats(BFloat16, const uint8_t* row, int32_t d, __mmask16 mask) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row + d * 2));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

KVELL_INLINE __m512 load_floats(Int8, const uint8_t* row, int32_t d, __mmask16 mask) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, row + d)));
}

KVELL_INLINE __m512 load_floats(Float8, const uint8_t* row, int32_t d, __mmask16 mask) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, row + d));
  const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(wide, _mm512_set1_epi32(0x80)), 24);
  const __m512i size = _mm512_slli_epi32(_mm512_and_si512(wide, _mm512_set1_epi32(0x7f)), 20);
  return _mm512_mul_ps(_mm512_castsi512_ps(_mm512_or_si512(sign, size)),
                       _mm512_set1_ps(Float8::kRebias));
}

template <class Pool>
struct Float16Kernel : FloatKernel<Avx512Lanes, Pool, 6, 4> {
  using Base = FloatKernel<Avx512Lanes, Pool, 6, 4>;
  using Own = Lay<Float16Kernel>;
  static constexpr int kChains = 4, kPageRows = 8;
  static constexpr int kItemBytes = sizeof(typename Pool::Stored);

  KVELL_INLINE __m512 items_of(__m512i x) { return _mm512_castsi512_ps(x); }
  KVELL_INLINE __m512i read_items(const uint8_t* row, int32_t d, __mmask16 mask,
                                  int32_t head_size) {
    return _mm512_castps_si512(read(row, d, mask, head_size));
  }

  static void pack_keys(const Own& lay, SpanRows rows, Stream& next) {
    transpose_span<Float16Kernel>(lay, rows, next);
  }

  static void pack_values(const Own& lay, SpanRows rows, Stream& next) {
    for (int i = 0; i < kvell::kSpan; ++i) {
      next.advance(Base::template lines<typename Pool::Stored>(lay.value_size));
      float* to = lay.values + int64_t(i) * lay.padded_size;
      for (int32_t d = 0; d < lay.padded_size; d += 16)
        _mm512_storeu_ps(to + d, read(rows[i], d, Avx512Lanes::lanes(0, lay.value_size - d),
                                      lay.head_size));
    }
  }

  static void widen_query(const Own& lay, int32_t rows_per_head) {
    ::widen_query<Float16Kernel>(lay, rows_per_head);
  }

  template <int R>
  KVELL_INLINE void scores_from_pages(const Own& lay, int32_t row, SpanRows keys, Stream& next,
                                      float (*scores)[kvell::kSpan]) {
    chained_scores<Float16Kernel, R>(lay, row, keys, next, scores);
  }

  template <int R, int C>
  KVELL_INLINE void add_from_pages(__m512 (&acc)[R][C], const float* weights, const Own& lay,
                                   SpanRows values, int32_t column, int32_t depth, Stream& next) {
    for (int32_t k = 0; k < depth; ++k) {
      const uint8_t* row = values[k];
      next.advance((C * kItemBytes + 3) / 4);
      for (int c = 0; c < C; ++c) {
        const int32_t at = column + c * 16;
        fetch_near(values + k, at * kItemBytes);
        const __m512 items = read(row, at, Avx512Lanes::lanes(0, lay.value_size - at), lay.head_size);
        for (int r = 0; r < R; ++r)
          acc[r][c] = Base::multiply_add(acc[r][c], Base::broadcast(weights + r * kvell::kSpan + k),
                                         items);
      }
    }
  }

 private:
  KVELL_INLINE __m512 read(const uint8_t* row, int32_t d, __mmask16 mask, int32_t head_size) {
    const __m512 numbers = load_floats(Pool{}, row, d, mask);
    if constexpr (Pool::kScaled)
      return _mm512_mul_ps(numbers, _mm512_set1_ps(scale_of<Pool>(row, head_size)));
    return numbers;
  }
};

}  // namespace
