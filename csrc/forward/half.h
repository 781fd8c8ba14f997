// Half-precision numbers: what scales of quantised weights are kept in.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

// Exact; not for infinities and NaN, which no scale is.
inline float half_at(const uint8_t* p) {
  uint16_t x;
  std::memcpy(&x, p, 2);
  const uint32_t bits = (uint32_t(x) & 0x7fff) << 13;  // exponents are 112 too small now
  float size;
  std::memcpy(&size, &bits, 4);
  size *= 0x1p112f;
  return x & 0x8000 ? -size : size;
}

}  // namespace
