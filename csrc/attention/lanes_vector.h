// Float lanes in the compiler's vector extension, as wide as one register of the flags'
// instruction set: four for SSE2 and NEON, eight for AVX2.
#pragma once
#include <cstdint>

#define KVELL_INLINE static inline __attribute__((always_inline))

namespace {

#ifdef __AVX__
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif

struct VectorLanes {
  typedef float Vec __attribute__((vector_size(kRegisterBytes)));
  typedef int32_t Int __attribute__((vector_size(kRegisterBytes)));
  typedef float Unaligned __attribute__((vector_size(kRegisterBytes), aligned(4)));
  static constexpr int kWidth = kRegisterBytes / 4;

  KVELL_INLINE Vec zero() { return Vec{}; }
  // As whole numbers, to which adding nothing is nothing: 0 + x would be an addition, as x may be -0.
  KVELL_INLINE Vec set(float x) {
    int32_t bits;
    __builtin_memcpy(&bits, &x, sizeof(bits));
    return (Vec)(Int{} + bits);
  }
  KVELL_INLINE Vec load(const float* p) { return *reinterpret_cast<const Unaligned*>(p); }
  KVELL_INLINE void store(float* p, Vec x) { *reinterpret_cast<Unaligned*>(p) = x; }
  // The flags of the translation unit decide whether this is one rounding or two.
  KVELL_INLINE Vec madd(Vec a, Vec b, Vec c) { return a * b + c; }
  KVELL_INLINE Vec add(Vec a, Vec b) { return a + b; }
  KVELL_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
  KVELL_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }
  KVELL_INLINE Vec div(Vec a, Vec b) { return a / b; }
  // x where a < b, else y
  KVELL_INLINE Vec where_less(Vec a, Vec b, Vec x, Vec y) { return a < b ? x : y; }
  KVELL_INLINE Vec round(Vec x) {
    const Vec magic = set(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer
    return (x + magic) - magic;
  }
  // x · 2^n for integral n in [-126, 0]
  KVELL_INLINE Vec scale_by_power(Vec x, Vec n) {
    const Int exponent = (__builtin_convertvector(n, Int) + 127) << 23;
    return x * (Vec)exponent;
  }
  // Lane i keeps x where begin <= i < end and becomes -inf elsewhere.
  KVELL_INLINE Vec keep(Vec x, int begin, int end) {
    Int lane{};
    for (int i = 0; i < kWidth; ++i) lane[i] = i;
    return ((lane >= begin) & (lane < end)) ? x : set(-__builtin_inff());
  }
  KVELL_INLINE float largest(Vec x) {
    float m = x[0];
    for (int i = 1; i < kWidth; ++i) m = x[i] > m ? x[i] : m;
    return m;
  }
  KVELL_INLINE float sum(Vec x) {
    float total = x[0];
    for (int i = 1; i < kWidth; ++i) total += x[i];
    return total;
  }
};

}  // namespace
