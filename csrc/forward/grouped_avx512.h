// Whole numbers of eight and four bits as floats in AVX-512 registers (rows of bf16: whole_avx512.h).
#pragma once
#include "attention/lanes_avx512.h"
#include "matrix.h"

namespace {

KVELL_INLINE __m512 halves_of(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

struct GroupedFloats512 {
  static constexpr int kUnpackedRows = 6;
  static constexpr uint32_t kOnes = 0x3f800000;

  KVELL_INLINE __m512 scales_at(const uint8_t* p) { return halves_of(p); }
  KVELL_INLINE __m512 int8(const uint8_t* quants, int64_t step, int c) {
    const auto* bytes = reinterpret_cast<const __m128i*>(quants + step * 32 + c * 16);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes)));
  }
  KVELL_INLINE __m512 int4(const uint8_t* quants, int64_t step, int c) {
    const auto* words = reinterpret_cast<const __m256i*>(quants + step / 4 * 64 + c * 32);
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(words));
    const __m512i bits = _mm512_srlv_epi32(wide, _mm512_set1_epi32(int(step % 4 * 4)));
    return _mm512_cvtepi32_ps(_mm512_and_si512(bits, _mm512_set1_epi32(15)));
  }
};

}  // namespace
