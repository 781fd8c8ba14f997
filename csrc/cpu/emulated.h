// Stand-ins for the instructions of AVX512_BF16 and AMX, in those of AVX-512: with KVELL_EMULATE, kernels
// that use them run, slowly, on a processor that lacks them. Included before each of their units.
//
// Products and sums come in the order that the manual gives (Intel SDM, VDPBF16PS and TDPBF16PS), each
// with one rounding. What is rounded to bf16 has zeros for denormal numbers, as there; sums keep them.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace kvell_emulated {

static inline __attribute__((always_inline)) __m256i rounded(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_mask_or_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits,
                                             _mm512_set1_epi32(0x400000));
  const __mmask16 denormal = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
  const __m512i kept =
      _mm512_mask_and_epi32(quiet, denormal, bits, _mm512_set1_epi32(int(0x80000000u)));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
}

static inline __attribute__((always_inline)) __m512 low(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
}
static inline __attribute__((always_inline)) __m512 high(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000u))));
}

static inline __attribute__((always_inline)) __m512 dot(__m512 sum, __m512bh x, __m512bh y) {
  const __m512i a = (__m512i)x, b = (__m512i)y;
  return _mm512_fmadd_ps(low(a), low(b), _mm512_fmadd_ps(high(a), high(b), sum));
}

static inline __attribute__((always_inline)) __m512bh two_rounded(__m512 above, __m512 below) {
  return (__m512bh)_mm512_inserti64x4(_mm512_castsi256_si512(rounded(below)), rounded(above), 1);
}

static inline __attribute__((always_inline)) __m128i rounded_four(__m128 x) {
  return _mm256_castsi256_si128(rounded(_mm512_castps128_ps512(x)));
}

struct Tile {
  int rows, row_bytes;
  alignas(64) uint32_t at[16][16];
};
static thread_local Tile tiles[8];

struct Shapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

static inline void load_shapes(const void* from) {
  Shapes shapes;
  std::memcpy(&shapes, from, sizeof shapes);
  for (int i = 0; i < 8; ++i) {
    tiles[i].rows = shapes.rows[i];
    tiles[i].row_bytes = shapes.row_bytes[i];
    std::memset(tiles[i].at, 0, sizeof tiles[i].at);
  }
}

static inline void zero(int tile) { std::memset(tiles[tile].at, 0, sizeof tiles[tile].at); }

static inline void load(int tile, const void* from, int64_t stride) {
  zero(tile);
  for (int row = 0; row < tiles[tile].rows; ++row)
    std::memcpy(tiles[tile].at[row], static_cast<const uint8_t*>(from) + row * stride, tiles[tile].row_bytes);
}

static inline void store(int tile, void* to, int64_t stride) {
  for (int row = 0; row < tiles[tile].rows; ++row)
    std::memcpy(static_cast<uint8_t*>(to) + row * stride, tiles[tile].at[row], tiles[tile].row_bytes);
}

static inline void multiply_tiles(int sums, int left, int right) {
  const int pairs = tiles[left].row_bytes / 4;
  for (int m = 0; m < tiles[sums].rows; ++m) {
    __m512 of_low = _mm512_setzero_ps(), of_high = _mm512_setzero_ps();
    for (int k = 0; k < pairs; ++k) {
      const __m512i a = _mm512_set1_epi32(int(tiles[left].at[m][k]));
      const __m512i b = _mm512_load_si512(tiles[right].at[k]);
      of_low = _mm512_fmadd_ps(low(a), low(b), of_low);
      of_high = _mm512_fmadd_ps(high(a), high(b), of_high);
    }
    void* at = tiles[sums].at[m];
    _mm512_store_ps(at, _mm512_add_ps(_mm512_load_ps(at), _mm512_add_ps(of_low, of_high)));
  }
}

}  // namespace kvell_emulated

#define __AVX512BF16__ 1
#define __AVX512VBMI__ 1
#define _mm512_dpbf16_ps kvell_emulated::dot
#define _mm512_cvtne2ps_pbh kvell_emulated::two_rounded
#define _mm512_cvtneps_pbh kvell_emulated::rounded
#define _mm_cvtneps_pbh kvell_emulated::rounded_four
#undef _tile_loadconfig
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig kvell_emulated::load_shapes
#define _tile_zero kvell_emulated::zero
#define _tile_loadd kvell_emulated::load
#define _tile_stored kvell_emulated::store
#define _tile_dpbf16ps kvell_emulated::multiply_tiles
