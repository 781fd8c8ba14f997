// AVX-512 with bf16 dot products: 32 elements a step.
#include <immintrin.h>

#include "cpu/bfloat16.h"
#include "tile.h"

namespace {

struct Avx512Lanes {
  using Sum = __m512;
  using Items = __m512bh;
  static constexpr int kElements = 32, kRows = 4;

  static Sum zero() { return _mm512_setzero_ps(); }
  static Items load(const uint16_t* p) { return (Items)_mm512_loadu_si512(p); }
  static Items load_some(const uint16_t* p, int count) {
    return (Items)_mm512_maskz_loadu_epi16((1u << count) - 1, p);
  }
  static Sum madd(Sum sum, Items a, Items b) { return _mm512_dpbf16_ps(sum, a, b); }

  static void finish(const Sum (&sums)[4], const uint16_t* bias, uint16_t* y, int count) {
    const __mmask8 mask = static_cast<__mmask8>((1u << count) - 1);
    __m128 total = fold(sums);
    if (bias) {
      const __m128i wide = _mm_cvtepu16_epi32(_mm_maskz_loadu_epi16(mask, bias));
      total = _mm_add_ps(total, _mm_castsi128_ps(_mm_slli_epi32(wide, 16)));
    }
    _mm_mask_storeu_epi16(y, mask, bf16_of(total));
  }

 private:
  // The four sums side by side; each folds its own lanes in the same order.
  static __m128 fold(const Sum (&s)[4]) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(s[0], s[1]), _mm512_unpackhi_ps(s[0], s[1]));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(s[2], s[3]), _mm512_unpackhi_ps(s[2], s[3]));
    const __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  }
};

}  // namespace

const kvell::LinearBackend* kvell::avx512_linear() {
  static const LinearBackend backend{"avx512", run_tiles<Avx512Lanes>};
  return &backend;
}
