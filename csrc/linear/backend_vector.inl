// A backend from the compiler's vector extension, as wide as one register of the flags'
// instruction set. The including unit names it: KVELL_LINEAR_FUNCTION, KVELL_LINEAR_NAME.
#include <cstring>

#include "cpu/bfloat16.h"
#include "tile.h"

namespace {

#ifdef __AVX__
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

// Two neighbouring elements lie in one 32-bit word and are its halves, shifted or masked
// into the place of a float's upper half.
struct VectorLanes {
  typedef float Sum __attribute__((vector_size(kWidth * 4)));
  typedef uint32_t Words __attribute__((vector_size(kWidth * 4)));
  typedef uint32_t Stored __attribute__((vector_size(kWidth * 4), aligned(2), may_alias));
  struct Items {
    Sum low, high;
  };
  static constexpr int kElements = 2 * kWidth, kRows = 2;

  static Sum zero() { return Sum{}; }
  static Items load(const uint16_t* p) {
    const Words words = *reinterpret_cast<const Stored*>(p);
    return {(Sum)(words << 16), (Sum)(words & 0xffff0000u)};
  }
  static Items load_some(const uint16_t* p, int count) {
    uint16_t some[kElements] = {};
    std::memcpy(some, p, count * sizeof(uint16_t));
    return load(some);
  }
  static Sum madd(Sum sum, const Items& a, const Items& b) {
    return sum + a.low * b.low + a.high * b.high;
  }

  static void finish(const Sum (&sums)[4], const uint16_t* bias, uint16_t* y, int count) {
    for (int o = 0; o < count; ++o) y[o] = bf16_of(folded(sums[o]) + (bias ? bf16_value(bias[o]) : 0.0f));
  }

 private:
  static float folded(Sum sum) {
    float total = sum[0];
    for (int i = 1; i < kWidth; ++i) total += sum[i];
    return total;
  }
};

}  // namespace

const kvell::LinearBackend* kvell::KVELL_LINEAR_FUNCTION() {
  static const LinearBackend backend{KVELL_LINEAR_NAME, run_tiles<VectorLanes>};
  return &backend;
}
