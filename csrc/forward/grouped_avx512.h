// Whole numbers of eight and four bits in AVX-512 registers: looked up in tables.
#pragma once
#include "attention/lanes_avx512.h"
#include "matrix.h"

namespace {

KVELL_INLINE __m512 halves_of(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// 0 … 127 as bf16: the upper or the lower byte of each. Made by the compiler: nothing of this
// instruction set may run before the processor was asked.
struct EightsTable {
  alignas(64) uint8_t upper[128] = {}, lower[128] = {};

  constexpr EightsTable() {
    int exponent = 0;
    for (int i = 1; i < 128; ++i) {
      if (i >> (exponent + 1)) ++exponent;
      const int bits = (127 + exponent) << 7 | (i << (7 - exponent) & 0x7f);
      upper[i] = static_cast<uint8_t>(bits >> 8);
      lower[i] = static_cast<uint8_t>(bits & 0xff);
    }
  }
};

constexpr EightsTable kEightsTable;

struct GroupedPairs512 {
  static constexpr int kUnpackedRows = 6;
  static constexpr uint32_t kOnes = 0x3f803f80;

  KVELL_INLINE __m512 scales_at(const uint8_t* p) { return halves_of(p); }

  // All 64 numbers of a step are made at once; the compiler keeps one of two equal calls.
  KVELL_INLINE __m512bh eights(const uint8_t* quants, int64_t step, int c) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // unpack works by 16 bytes
    const __m512i q = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(quants + step * 64));
    const __m512i size = _mm512_abs_epi8(q);
    const __m512i low = look_up(kEightsTable.lower, size);
    const __m512i sign = _mm512_set1_epi8(-128);
    const __m512i high = _mm512_ternarylogic_epi32(look_up(kEightsTable.upper, size), q, sign, 0xf8);
    return (__m512bh)(c ? _mm512_unpackhi_epi8(low, high) : _mm512_unpacklo_epi8(low, high));
  }

  // Only five bits of an index count, and the table has its values twice.
  KVELL_INLINE __m512bh fours(const uint8_t* quants, int64_t step, int c) {
    const __m512i words = _mm512_loadu_si512(quants + step / 4 * 128 + c * 64);
    const __m512i counts = _mm512_set1_epi16(static_cast<short>(step % 4 * 4));
    return (__m512bh)_mm512_permutexvar_epi16(_mm512_srlv_epi16(words, counts), sixteen());
  }

 private:
  KVELL_INLINE __m512i look_up(const uint8_t* table, __m512i index) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64));
  }
  // 0 … 15 as bf16, twice.
  KVELL_INLINE __m512i sixteen() {
    const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (__m512i)_mm512_cvtne2ps_pbh(values, values);
  }
};

struct GroupedFloats512 {
  static constexpr int kUnpackedRows = 6;
  static constexpr uint32_t kOnes = 0x3f800000;

  KVELL_INLINE __m512 scales_at(const uint8_t* p) { return halves_of(p); }
  KVELL_INLINE __m512 eights(const uint8_t* quants, int64_t step, int c) {
    const auto* bytes = reinterpret_cast<const __m128i*>(quants + step * 32 + c * 16);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes)));
  }
  KVELL_INLINE __m512 fours(const uint8_t* quants, int64_t step, int c) {
    const auto* words = reinterpret_cast<const __m256i*>(quants + step / 4 * 64 + c * 32);
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(words));
    const __m512i bits = _mm512_srlv_epi32(wide, _mm512_set1_epi32(int(step % 4 * 4)));
    return _mm512_cvtepi32_ps(_mm512_and_si512(bits, _mm512_set1_epi32(15)));
  }
};

}  // namespace
