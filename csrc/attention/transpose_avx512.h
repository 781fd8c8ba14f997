// Scores of rows that lie in pages: turned in registers, so that lanes become positions.
#pragma once
#include "lanes_avx512.h"

#include "lay.h"
#include "stream.h"

namespace {

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

// Quarter j of r[i] becomes quarter i of r[j].
KVELL_INLINE void transpose_quarters(__m512i (&r)[4]) {
  const __m512i a = _mm512_shuffle_i32x4(r[0], r[1], 0x44);
  const __m512i b = _mm512_shuffle_i32x4(r[0], r[1], 0xee);
  const __m512i c = _mm512_shuffle_i32x4(r[2], r[3], 0x44);
  const __m512i d = _mm512_shuffle_i32x4(r[2], r[3], 0xee);
  r[0] = _mm512_shuffle_i32x4(a, c, 0x88);
  r[1] = _mm512_shuffle_i32x4(a, c, 0xdd);
  r[2] = _mm512_shuffle_i32x4(b, d, 0x88);
  r[3] = _mm512_shuffle_i32x4(b, d, 0xdd);
}

// Lane 4 q + j of sums[g] holds chain j of position 4 g + q: returns each position's sum of
// its four chains, in the order of chains.
KVELL_INLINE __m512 add_chains(const __m512 (&sums)[4]) {
  const __m512 a = _mm512_unpacklo_ps(sums[0], sums[1]), b = _mm512_unpackhi_ps(sums[0], sums[1]);
  const __m512 c = _mm512_unpacklo_ps(sums[2], sums[3]), d = _mm512_unpackhi_ps(sums[2], sums[3]);
  const auto low = [](__m512 x, __m512 y) __attribute__((always_inline)) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
  };
  const auto high = [](__m512 x, __m512 y) __attribute__((always_inline)) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
  };
  const __m512 three = _mm512_add_ps(_mm512_add_ps(low(a, c), high(a, c)), low(b, d));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_ps(order, _mm512_add_ps(three, high(b, d)));
}

constexpr int kFours = 2;  // fours of positions that are multiplied together: as registers allow

// Cache lines of sixteen items of each of `rows` rows.
template <class K>
constexpr int lines_of(int rows) {
  return rows * 16 * K::kItemBytes / 64;
}

template <class K>
static void transpose_span(const Lay<K>& lay, SpanRows rows, Stream& next) {
  const int32_t items = lay.query_items;
  auto* to = lay.keys;
  for (int i = 0; i < kvell::kSpan; i += 16)
    for (int32_t item = 0; item < items; item += 16) {
      __m512i r[16];
      next.advance(lines_of<K>(16));
      const __mmask16 mask = Avx512Lanes::lanes(0, items - item);
      for (int j = 0; j < 16; ++j) r[j] = K::read_items(rows[i + j], item, mask, lay.head_size);
      transpose16(r);
      const int32_t left = items - item < 16 ? items - item : 16;
      for (int32_t j = 0; j < left; ++j)
        _mm512_storeu_si512(to + (item + j) * kvell::kSpan + i, r[j]);
    }
}

// Every four items of the query four times, side by side, those of a head's rows after one
// another: to spread them at each use would take the place of a multiplication.
template <class K>
static void widen_query(const Lay<K>& lay, int32_t rows_per_head) {
  auto* to = lay.wide_query;
  for (int32_t first = 0; first < lay.rows; first += rows_per_head)
    for (int32_t item = 0; item < lay.query_items; item += 4)
      for (int32_t r = 0; r < rows_per_head; ++r, to += 16) {
        const auto* four = lay.query + int64_t(first + r) * lay.query_items + item;
        _mm512_store_si512(
            to, _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(four))));
      }
}

// acc[g][r] += four chains of 4 Blocks items of four positions, the g-th ones, for R query rows: `keys`
// are those positions' rows, `wide` the queries' items. Each of these is loaded once for all positions:
// a load for every product is more than there are ports for.
template <class K, int R, int Blocks>
KVELL_INLINE void add_quarters(__m512 (*acc)[R], const typename K::Item* wide, SpanRows keys,
                               int32_t item, int32_t head_size) {
  constexpr __mmask16 mask = Blocks == 4 ? 0xffff : (1u << (4 * Blocks)) - 1;
  __m512i quarters[kFours][4];
  for (int g = 0; g < kFours; ++g) {
    for (int q = 0; q < 4; ++q) {
      fetch_near(keys + 4 * g + q, item * K::kItemBytes);
      quarters[g][q] = K::read_items(keys[4 * g + q], item, mask, head_size);
    }
    transpose_quarters(quarters[g]);
  }
  for (int b = 0; b < Blocks; ++b)
    for (int r = 0; r < R; ++r) {
      const auto query = K::load(wide + (b * R + r) * 16);
      for (int g = 0; g < kFours; ++g)
        acc[g][r] = K::multiply_add(acc[g][r], K::items_of(quarters[g][b]), query);
    }
}

// Sixteen positions' scores of a head's R query rows. Lanes are four positions times four
// chains: to bring quarters of rows together costs half of a whole transposition. Eight positions
// after the other eight, so that their rows are read through; the processor overlaps their sums.
template <class K, int R>
KVELL_INLINE void sixteen_scores(const Lay<K>& lay, const typename K::Item* wide, SpanRows keys,
                                 int lines, Stream& next, float* scores) {
  const int32_t head_size = lay.head_size, items = lay.query_items;
  const int32_t whole = items / 16 * 16, rest = (items - whole) / 4;
  const int a_few = lines * kFours / 4;  // at a time: what comes in bursts is dropped
  __m512 acc[4][R];
#pragma GCC unroll 4
  for (int g = 0; g < 4; g += kFours) {
    const typename K::Item* query = wide;
    for (int i = g; i < g + kFours; ++i)
      for (int r = 0; r < R; ++r) acc[i][r] = _mm512_setzero_ps();
    for (int32_t item = 0; item < whole; item += 16, query += R * 64) {
      next.advance(a_few);
      add_quarters<K, R, 4>(acc + g, query, keys + 4 * g, item, head_size);
    }
    if (rest > 0) next.advance(a_few);
    if (rest == 1) add_quarters<K, R, 1>(acc + g, query, keys + 4 * g, whole, head_size);
    if (rest == 2) add_quarters<K, R, 2>(acc + g, query, keys + 4 * g, whole, head_size);
    if (rest == 3) add_quarters<K, R, 3>(acc + g, query, keys + 4 * g, whole, head_size);
  }
  for (int r = 0; r < R; ++r) {
    const __m512 sums[4] = {acc[0][r], acc[1][r], acc[2][r], acc[3][r]};
    _mm512_store_ps(scores + r * kvell::kSpan, add_chains(sums));
  }
}

// What multiply<K, R, …, 4> makes of transposed keys, for all R query rows of a head.
template <class K, int R>
KVELL_INLINE void chained_scores(const Lay<K>& lay, int32_t row, SpanRows keys, Stream& next,
                                 float (*scores)[kvell::kSpan]) {
  const auto* wide = lay.wide_query + int64_t(row) * lay.query_items * 4;
  for (int i = 0; i < kvell::kSpan; i += 16)
    sixteen_scores<K, R>(lay, wide, keys + i, lines_of<K>(16), next, scores[0] + i);
}

}  // namespace
