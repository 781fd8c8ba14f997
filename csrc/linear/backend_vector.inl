// A backend from the compiler's vector extension, as wide as one register of the flags'
// instruction set. The including unit names it: KVELL_LINEAR_FUNCTION, KVELL_LINEAR_NAME.
#include <cstring>

#include "tile.h"

namespace {

#ifdef __AVX__
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

struct VectorLanes {
  typedef float Sum __attribute__((vector_size(kWidth * 4)));
  typedef uint32_t Bits __attribute__((vector_size(kWidth * 4)));
  typedef uint16_t Stored __attribute__((vector_size(kWidth * 2), aligned(2)));
  using Items = Sum;
  static constexpr int kElements = kWidth, kRows = 2;

  static Sum zero() { return Sum{}; }
  static Items load(const uint16_t* p) {
    return (Items)(__builtin_convertvector(*reinterpret_cast<const Stored*>(p), Bits) << 16);
  }
  static Items load_some(const uint16_t* p, int count) {
    uint16_t some[kWidth] = {};
    std::memcpy(some, p, count * sizeof(uint16_t));
    return load(some);
  }
  static Sum madd(Sum sum, Items a, Items b) { return sum + a * b; }

  static void finish(const Sum (&sums)[4], const uint16_t* bias, uint16_t* y, int count) {
    for (int o = 0; o < count; ++o) y[o] = rounded(folded(sums[o]) + (bias ? value(bias[o]) : 0.0f));
  }

 private:
  static float folded(Sum sum) {
    float total = sum[0];
    for (int i = 1; i < kWidth; ++i) total += sum[i];
    return total;
  }
  static float value(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
  }
  // To the nearest bf16, ties to even; a NaN stays one.
  static uint16_t rounded(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

}  // namespace

const kvell::LinearBackend* kvell::KVELL_LINEAR_FUNCTION() {
  static const LinearBackend backend{KVELL_LINEAR_NAME, run_tiles<VectorLanes>};
  return &backend;
}
