// AVX-512 without bf16 dot products, or with slow ones.
#include "items_avx512.h"
#include "widened.h"

namespace {

struct Wide512 : Halves512 {
  static constexpr int kWideRows = 12, kWideColumns = 2;
  using Plain = PlainWeights<Wide512, WideSteps<Wide512, WidenedRows<Wide512>>>;

  template <int P>
  KVELL_INLINE __m512 part(const uint8_t* items) {
    const __m512i pairs = _mm512_loadu_si512(items);
    if constexpr (P == 0) return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000u))));
  }

  KVELL_INLINE void widen(float* to, const uint16_t* from, int64_t numbers) {
    for (int64_t i = 0; i < numbers; i += 16) {
      const __mmask16 mask = Lanes::lanes(0, static_cast<int>(numbers - i));
      const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from + i));
      _mm512_mask_storeu_ps(to + i, mask, _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)));
    }
  }
};

}  // namespace

const kvell::Kernels* kvell::avx512f_forward(Element element) {
  return table_of<Wide512, Floats512>("avx512f", element);
}
