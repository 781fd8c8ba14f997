// Kernels from the compiler's vector extension, as wide as one register of the flags'
// instruction set. The including unit names them: KVELL_FORWARD_FUNCTION, KVELL_FORWARD_NAME.
#include "attention/lanes_vector.h"

#include "grouped_vector.h"
#include "product.h"
#include "rows.h"
#include "table.h"
#include "widened.h"

namespace {

KVELL_INLINE void round_to_bf16(uint16_t* to, const float* x, int64_t size) {
  for (int64_t i = 0; i < size; ++i) to[i] = bf16_of(x[i]);
}

// Two neighbouring elements lie in one 32-bit word and are its halves, shifted or masked
// into the place of a float's upper half.
struct PairItems {
  VectorLanes::Vec low, high;
};

struct PairsVector : GroupedPairs<PairItems> {
  using Lanes = VectorLanes;
  using Element = uint16_t;
  using Items = PairItems;
  static constexpr int kRows = 2;
  static constexpr auto kElement = kvell::Element::bfloat16;
  template <kvell::Form F>
  using FewBits = GroupedWeights<PairsVector, F>;
  static constexpr int kWideRows = 6, kWideColumns = 2;
  using Plain = PlainWeights<PairsVector, WideSteps<PairsVector, WidenedRows<PairsVector>>>;

  template <int P>
  KVELL_INLINE Lanes::Vec part(const uint8_t* items) {
    const Words words = *reinterpret_cast<const WordsAt*>(items);
    return (Lanes::Vec)(P == 0 ? words << 16 : words & 0xffff0000u);
  }
  KVELL_INLINE void widen(float* to, const uint16_t* from, int64_t numbers) {
    for (int64_t i = 0; i < numbers; ++i) to[i] = bf16_value(from[i]);
  }
  KVELL_INLINE Items halves(Words words) {
    return {(Lanes::Vec)(words << 16), (Lanes::Vec)(words & 0xffff0000u)};
  }
  KVELL_INLINE Items load(const uint8_t* p) { return halves(*reinterpret_cast<const WordsAt*>(p)); }
  KVELL_INLINE void store_items(uint8_t* p, const Items& x) {
    *reinterpret_cast<WordsAt*>(p) = (Words)x.low >> 16 | (Words)x.high;
  }
  KVELL_INLINE Items broadcast(uint32_t item) { return halves(Words{} + item); }
  KVELL_INLINE Lanes::Vec madd(Lanes::Vec sum, const Items& a, const Items& b) {
    return Lanes::madd(a.high, b.high, Lanes::madd(a.low, b.low, sum));
  }
  KVELL_INLINE float value(uint16_t x) { return bf16_value(x); }
  KVELL_INLINE void store_elements(uint16_t* to, const float* x, int64_t size) {
    round_to_bf16(to, x, size);
  }
  KVELL_INLINE void store_bf16(uint16_t* to, const float* x, int64_t size) {
    round_to_bf16(to, x, size);
  }
};

struct FloatsVector : GroupedFloats {
  using Lanes = VectorLanes;
  using Element = float;
  using Items = Lanes::Vec;
  static constexpr int kRows = 2;
  static constexpr auto kElement = kvell::Element::float32;
  template <kvell::Form F>
  using FewBits = GroupedWeights<FloatsVector, F>;
  static constexpr int kWideRows = 6, kWideColumns = 2;
  using Plain = PlainWeights<FloatsVector, WideSteps<FloatsVector, PlainInputs>>;

  template <int>
  KVELL_INLINE Lanes::Vec part(const uint8_t* items) {
    return load(items);
  }
  KVELL_INLINE Items load(const uint8_t* p) {
    return Lanes::load(reinterpret_cast<const float*>(p));
  }
  KVELL_INLINE void store_items(uint8_t* p, Items x) { Lanes::store(reinterpret_cast<float*>(p), x); }
  KVELL_INLINE Items broadcast(uint32_t item) {
    float x;
    std::memcpy(&x, &item, 4);
    return Lanes::set(x);
  }
  KVELL_INLINE Lanes::Vec madd(Lanes::Vec sum, Items a, Items b) { return Lanes::madd(a, b, sum); }
  KVELL_INLINE float value(float x) { return x; }
  KVELL_INLINE void store_elements(float* to, const float* x, int64_t size) {
    std::memcpy(to, x, size * sizeof(float));
  }
  KVELL_INLINE void store_bf16(uint16_t* to, const float* x, int64_t size) {
    round_to_bf16(to, x, size);
  }
};

}  // namespace

const kvell::Kernels* kvell::KVELL_FORWARD_FUNCTION(Element element) {
  return table_of<PairsVector, FloatsVector>(KVELL_FORWARD_NAME, element);
}
