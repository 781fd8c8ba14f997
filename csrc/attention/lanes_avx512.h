// Sixteen float lanes in one AVX-512 register.
#pragma once
#include <immintrin.h>

#include <cstdint>

#define KVELL_INLINE static inline __attribute__((always_inline))

namespace {

struct Avx512Lanes {
  using Vec = __m512;
  static constexpr int kWidth = 16;

  KVELL_INLINE Vec zero() { return _mm512_setzero_ps(); }
  KVELL_INLINE Vec set(float x) { return _mm512_set1_ps(x); }
  KVELL_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
  KVELL_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
  KVELL_INLINE Vec madd(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  KVELL_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  KVELL_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
  KVELL_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
  KVELL_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
  // x where a < b, else y
  KVELL_INLINE Vec where_less(Vec a, Vec b, Vec x, Vec y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
  }
  KVELL_INLINE Vec round(Vec x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // x · 2^n for integral n
  KVELL_INLINE Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
  // Lane i keeps x where begin <= i < end and becomes -inf elsewhere.
  KVELL_INLINE Vec keep(Vec x, int begin, int end) {
    return _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), lanes(begin, end), x);
  }
  KVELL_INLINE float largest(Vec x) { return _mm512_reduce_max_ps(x); }
  KVELL_INLINE float sum(Vec x) { return _mm512_reduce_add_ps(x); }

  KVELL_INLINE uint32_t below(int n) { return n <= 0 ? 0u : n >= 16 ? 0xffffu : (1u << n) - 1; }
  KVELL_INLINE __mmask16 lanes(int begin, int end) {
    return static_cast<__mmask16>(below(end) & ~below(begin));
  }
};

}  // namespace
