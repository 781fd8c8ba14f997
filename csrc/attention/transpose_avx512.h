// Turns 64 rows of 32-bit items into item rows of 64 positions.
#pragma once
#include "lanes_avx512.h"

#include "lay.h"
#include "stream.h"

namespace {

KVELL_INLINE __m512i load_items(const uint8_t* row, int32_t item, __mmask16 mask) {
  return row ? _mm512_maskz_loadu_epi32(mask, row + item * 4) : _mm512_setzero_si512();
}

// r[i] lane j becomes r[j] lane i.
KVELL_INLINE void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Cache lines of sixteen rows' sixteen items.
template <class K>
constexpr int kTileLines = 16 * 16 * K::kItemBytes / 64;

// Sixteen rows' items [item, item + 16) transposed; those past the row's end are 0.
template <class K>
KVELL_INLINE void load_transposed(__m512i (&r)[16], const Lay<K>& lay, SpanRows rows, int first,
                                  int32_t item) {
  const __mmask16 mask = Avx512Lanes::lanes(0, lay.query_items - item);
  for (int j = 0; j < 16; ++j) r[j] = K::read_items(rows[first + j], item, mask, lay.head_size);
  transpose16(r);
}

template <class K>
static void transpose_span(const Lay<K>& lay, SpanRows rows, Stream& next) {
  const int32_t items = lay.query_items;
  auto* to = lay.keys;
  for (int i = 0; i < kvell::kSpan; i += 16)
    for (int32_t item = 0; item < items; item += 16) {
      __m512i r[16];
      next.advance(kTileLines<K>);
      load_transposed(r, lay, rows, i, item);
      const int32_t left = items - item < 16 ? items - item : 16;
      for (int32_t j = 0; j < left; ++j)
        _mm512_storeu_si512(to + (item + j) * kvell::kSpan + i, r[j]);
    }
}

// What multiply<K, R, 4> makes of transposed keys, for R query rows, 16 positions at a time.
template <class K, int R>
KVELL_INLINE void transposed_scores(const Lay<K>& lay, int32_t row, SpanRows keys, Stream& next,
                                    float (*scores)[kvell::kSpan]) {
  const auto* query = lay.query + int64_t(row) * lay.query_items;
  for (int32_t item = 0; item < lay.query_items; item += 16) {
    const int32_t left = lay.query_items - item;
    // Neighbouring groups of positions do not wait for each other's sums.
    for (int i = 0; i < kvell::kSpan; i += 16) {
      __m512i column[16];
      next.advance(kTileLines<K>);
      load_transposed(column, lay, keys, i, item);
      __m512 acc[R];
      for (int r = 0; r < R; ++r)
        acc[r] = item == 0 ? _mm512_setzero_ps() : _mm512_load_ps(scores[r] + i);
      const auto step = [&](int j) __attribute__((always_inline)) {
        for (int r = 0; r < R; ++r)
          acc[r] = K::multiply_add(acc[r], K::broadcast(query + r * lay.query_items + item + j),
                                   K::items_of(column[j]));
      };
      if (left >= 16)
        for (int j = 0; j < 16; ++j) step(j);
      else
        for (int j = 0; j < left; ++j) step(j);
      for (int r = 0; r < R; ++r) _mm512_store_ps(scores[r] + i, acc[r]);
    }
  }
}

}  // namespace
