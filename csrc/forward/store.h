// A vector as a page holds it: float32, bf16, or eight bits with the float32 it was divided by
// behind it (attention/quantised.py does the same in torch, to the last bit).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention/views.h"
#include "cpu/bfloat16.h"

namespace {

// Sign, four bits of exponent (bias 7), three of mantissa; |x| <= 448. Ties to even.
inline uint8_t float8_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  const float size = std::fabs(x);
  if (size < 0x1p-6f) return sign | static_cast<uint8_t>(std::nearbyint(size * 512.0f));
  bits &= 0x7fffffffu;
  const uint32_t rounded = bits + 0x7ffffu + (bits >> 20 & 1);
  return sign | static_cast<uint8_t>((rounded >> 20) - (120 << 3));
}

inline float largest_size(const float* x, int64_t size) {
  float largest = 0.0f;
  for (int64_t i = 0; i < size; ++i) largest = std::fabs(x[i]) > largest ? std::fabs(x[i]) : largest;
  return largest;
}

template <class Round>
void store_scaled(const float* x, int64_t size, float most, uint8_t* to, Round round) {
  const float scale = largest_size(x, size) / most, divisor = scale == 0.0f ? 1.0f : scale;
  for (int64_t i = 0; i < size; ++i) {
    const float step = x[i] / divisor;
    to[i] = round(step > most ? most : step < -most ? -most : step);
  }
  std::memcpy(to + size, &scale, 4);
}

template <class K>
void store_vector(kvell::Element element, const float* x, int64_t size, uint8_t* to) {
  switch (element) {
    case kvell::Element::float32: std::memcpy(to, x, size * 4); return;
    case kvell::Element::bfloat16: K::store_bf16(reinterpret_cast<uint16_t*>(to), x, size); return;
    case kvell::Element::int8:
      return store_scaled(x, size, 127.0f, to, [](float step) {
        return static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(step)));
      });
    case kvell::Element::float8:
      return store_scaled(x, size, 448.0f, to, [](float step) { return float8_of(step); });
  }
}

}  // namespace
