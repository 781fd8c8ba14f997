// bf16 in pairs, multiplied by AVX-512's dot products.
#pragma once
#include "items_avx512.h"

namespace {

struct Pairs512 : Halves512 {
  using Items = __m512bh;
  static constexpr int kRows = 12;
  using Plain = PlainWeights<Pairs512, ItemSteps<Pairs512>>;

  KVELL_INLINE Items load(const uint8_t* p) { return (Items)_mm512_loadu_si512(p); }
  KVELL_INLINE Items broadcast(uint32_t item) { return (Items)_mm512_set1_epi32(int(item)); }
  KVELL_INLINE __m512 madd(__m512 sum, Items a, Items b) { return _mm512_dpbf16_ps(sum, a, b); }
};

}  // namespace
