// Models' elements in AVX-512 registers.
#pragma once
#include "attention/lanes_avx512.h"

#include "grouped_avx512.h"
#include "product.h"
#include "rows.h"
#include "table.h"
#include "whole_avx512.h"

namespace {

// To the nearest, ties to even; a NaN stays one. The flags decide who does it.
KVELL_INLINE __m256i bf16_rounded(__m512 x) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i kept = _mm512_mask_or_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits,
                                            _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
#endif
}

KVELL_INLINE void round_to_bf16(uint16_t* to, const float* x, int64_t size) {
  for (int64_t i = 0; i < size; i += 16) {
    const __mmask16 mask = Avx512Lanes::lanes(0, static_cast<int>(size - i));
    const __m512 part = _mm512_maskz_loadu_ps(mask, x + i);
    _mm256_mask_storeu_epi16(to + i, mask, bf16_rounded(part));
  }
}

// bf16, but for how plain weights are multiplied.
struct Halves512 {
  using Lanes = Avx512Lanes;
  using Element = uint16_t;
  static constexpr auto kElement = kvell::Element::bfloat16;
  template <kvell::Form F>
  using FewBits = WholeWeights<F>;

  KVELL_INLINE float value(uint16_t x) { return bf16_value(x); }
  KVELL_INLINE void store_elements(uint16_t* to, const float* x, int64_t size) {
    round_to_bf16(to, x, size);
  }
  KVELL_INLINE void store_bf16(uint16_t* to, const float* x, int64_t size) {
    round_to_bf16(to, x, size);
  }
};

struct Floats512 : GroupedFloats512 {
  using Lanes = Avx512Lanes;
  using Element = float;
  using Items = __m512;
  static constexpr int kRows = 12;
  static constexpr auto kElement = kvell::Element::float32;
  template <kvell::Form F>
  using FewBits = GroupedWeights<Floats512, F>;
  using Plain = PlainWeights<Floats512, ItemSteps<Floats512>>;

  KVELL_INLINE Items load(const uint8_t* p) { return _mm512_loadu_ps(p); }
  KVELL_INLINE void store_items(uint8_t* p, Items x) { _mm512_storeu_ps(p, x); }
  KVELL_INLINE Items broadcast(uint32_t item) {
    return _mm512_castsi512_ps(_mm512_set1_epi32(int(item)));
  }
  KVELL_INLINE __m512 madd(__m512 sum, Items a, Items b) { return _mm512_fmadd_ps(a, b, sum); }
  KVELL_INLINE float value(float x) { return x; }
  KVELL_INLINE void store_elements(float* to, const float* x, int64_t size) {
    std::memcpy(to, x, size * sizeof(float));
  }
  KVELL_INLINE void store_bf16(uint16_t* to, const float* x, int64_t size) {
    round_to_bf16(to, x, size);
  }
};

}  // namespace
