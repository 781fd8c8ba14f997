// Models' elements in AVX-512 registers.
#pragma once
#include "attention/lanes_avx512.h"
#include "cpu/bfloat16.h"

#include "grouped_avx512.h"
#include "product.h"
#include "rows.h"
#include "table.h"
#include "whole_avx512.h"

namespace {

KVELL_INLINE void round_to_bf16(uint16_t* to, const float* x, int64_t size) {
  for (int64_t i = 0; i < size; i += 16) {
    const __mmask16 mask = Avx512Lanes::lanes(0, static_cast<int>(size - i));
    const __m512 part = _mm512_maskz_loadu_ps(mask, x + i);
    _mm256_mask_storeu_epi16(to + i, mask, bf16_of(part));
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
