// Conversions between float32 and bf16, its upper half: one rounding for all modules.
//
// Rounding is to nearest, ties to even; what is too large becomes infinite. A NaN stays a NaN: it
// keeps its sign and the upper bits of its payload, and becomes quiet. The scalar and the vector
// forms agree bit for bit, with one exception: AVX512_BF16's instructions take denormal numbers
// for zeros of the same sign.
#pragma once
#include <cstdint>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

static inline __attribute__((always_inline)) float bf16_value(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float wide;
  __builtin_memcpy(&wide, &bits, 4);
  return wide;
}

static inline __attribute__((always_inline)) uint16_t bf16_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>(x != x ? bits >> 16 | 0x40 : rounded);
}

#if defined(__AVX512F__)
static inline __attribute__((always_inline)) __m256i bf16_of(__m512 x) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i kept = _mm512_mask_or_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits,
                                            _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
#endif
}
#endif

#if defined(__AVX512BF16__) && defined(__AVX512VL__)
// In the lower half of the result.
static inline __attribute__((always_inline)) __m128i bf16_of(__m128 x) {
  return (__m128i)_mm_cvtneps_pbh(x);
}
#endif

}  // namespace
