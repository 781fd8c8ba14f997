// Whole numbers of eight and four bits in the compiler's vector extension.
#pragma once
#include "attention/lanes_vector.h"
#include "matrix.h"

namespace {

constexpr int kLanes = VectorLanes::kWidth;
typedef uint32_t Words __attribute__((vector_size(kRegisterBytes)));
typedef uint32_t WordsAt __attribute__((vector_size(kRegisterBytes), aligned(4), may_alias));
typedef uint16_t ShortsAt __attribute__((vector_size(kRegisterBytes / 2), aligned(2), may_alias));
typedef int8_t BytesAt __attribute__((vector_size(kRegisterBytes / 4), aligned(1), may_alias));

KVELL_INLINE Words shorts_at(const uint8_t* p) {
  return __builtin_convertvector(*reinterpret_cast<const ShortsAt*>(p), Words);
}

KVELL_INLINE VectorLanes::Vec numbers(Words x) {
  return __builtin_convertvector((VectorLanes::Int)x, VectorLanes::Vec);
}

// Half precision to float32 (half.h says how).
KVELL_INLINE VectorLanes::Vec halves_of(const uint8_t* p) {
  const Words halves = shorts_at(p);
  const VectorLanes::Vec size = (VectorLanes::Vec)((halves & 0x7fffu) << 13) * 0x1p112f;
  return (VectorLanes::Vec)((Words)size | (halves & 0x8000u) << 16);
}

// `Items` are {low, high}: the two numbers of each output.
template <class Items>
struct GroupedPairs {
  static constexpr int kUnpackedRows = 2;
  static constexpr uint32_t kOnes = 0x3f803f80;

  KVELL_INLINE VectorLanes::Vec scales_at(const uint8_t* p) { return halves_of(p); }
  KVELL_INLINE Items int8(const uint8_t* quants, int64_t step, int c) {
    const auto pairs = (VectorLanes::Int)shorts_at(quants + step * 64 + c * kLanes * 2);
    return {numbers((Words)(pairs << 24 >> 24)), numbers((Words)(pairs << 16 >> 24))};
  }
  KVELL_INLINE Items int4(const uint8_t* quants, int64_t step, int c) {
    const Words pairs =
        *reinterpret_cast<const WordsAt*>(quants + step / 4 * 128 + c * kRegisterBytes);
    const uint32_t shift = static_cast<uint32_t>(step % 4 * 4);
    return {numbers(pairs >> shift & 15u), numbers(pairs >> (16 + shift) & 15u)};
  }
};

struct GroupedFloats {
  static constexpr int kUnpackedRows = 2;
  static constexpr uint32_t kOnes = 0x3f800000;

  KVELL_INLINE VectorLanes::Vec scales_at(const uint8_t* p) { return halves_of(p); }
  KVELL_INLINE VectorLanes::Vec int8(const uint8_t* quants, int64_t step, int c) {
    const auto* bytes = reinterpret_cast<const BytesAt*>(quants + step * 32 + c * kLanes);
    return __builtin_convertvector(*bytes, VectorLanes::Vec);
  }
  KVELL_INLINE VectorLanes::Vec int4(const uint8_t* quants, int64_t step, int c) {
    const Words words = shorts_at(quants + step / 4 * 64 + c * kLanes * 2);
    return numbers(words >> static_cast<uint32_t>(step % 4 * 4) & 15u);
  }
};

}  // namespace
