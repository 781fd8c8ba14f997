// Kernel whose item is two bf16, for vdpbf16ps: K as pairs of neighbouring dimensions,
// V and the weights as pairs of neighbouring positions.
#pragma once
#include "lanes_avx512.h"

#include "scores_avx512.h"
#include "tile.h"
#include "transpose_avx512.h"

namespace {

struct PairKernel : PlainRooms<Avx512Lanes, 2> {
  using Lanes = Avx512Lanes;
  using Item = uint32_t;
  using Items = __m512bh;
  static constexpr int kPerItem = 2, kRows = 6, kColumns = 4;
  static constexpr int kChains = 4, kPageRows = 8;
  static constexpr int kItemBytes = 4;

  KVELL_INLINE Items load(const uint32_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
  KVELL_INLINE Items broadcast(const uint32_t* p) {
    return (__m512bh)_mm512_set1_epi32(static_cast<int>(*p));
  }
  KVELL_INLINE Items items_of(__m512i x) { return (__m512bh)x; }
  KVELL_INLINE __m512 multiply_add(__m512 acc, Items a, Items b) {
    return _mm512_dpbf16_ps(acc, a, b);
  }

  static void pack_keys(const Lay<PairKernel>& lay, SpanRows rows, Stream& next) {
    transpose_span<PairKernel>(lay, rows, next);
  }

  // One item row per pair of positions: low half the even position's element, high the odd's.
  static void pack_values(const Lay<PairKernel>& lay, SpanRows rows, Stream& next) {
    const __m512i first = pair_order(0), second = pair_order(16);
    uint32_t* to = lay.values;
    for (int i = 0; i < kvell::kSpan; i += 2, to += lay.padded_size) {
      next.advance((lay.value_size + 15) / 16);
      const uint8_t *even = rows[i], *odd = rows[i + 1];
      for (int32_t d = 0; d < lay.padded_size; d += 32) {
        const __mmask32 mask = elements_left(lay.value_size - d);
        const __m512i a = load_row(even, d, mask), b = load_row(odd, d, mask);
        _mm512_storeu_si512(to + d, _mm512_permutex2var_epi16(a, first, b));
        if (d + 16 < lay.padded_size)
          _mm512_storeu_si512(to + d + 16, _mm512_permutex2var_epi16(a, second, b));
      }
    }
  }

  static void widen_query(const Lay<PairKernel>& lay, int32_t rows_per_head) {
    ::widen_query<PairKernel>(lay, rows_per_head);
  }

  template <int R>
  KVELL_INLINE void scores_from_pages(const Lay<PairKernel>& lay, int32_t row, SpanRows keys,
                                      Stream& next, float (*scores)[kvell::kSpan]) {
    chained_scores<PairKernel, R>(lay, row, keys, next, scores);
  }

  KVELL_INLINE __m512i read_items(const uint8_t* row, int32_t item, __mmask16 mask, int32_t) {
    return _mm512_maskz_loadu_epi32(mask, row + item * 4);
  }

  // Adds weights × V for dimensions [column, column + 16 C), as far as they exist.
  template <int R, int C>
  KVELL_INLINE void add_from_pages(__m512 (&acc)[R][C], const uint32_t* weights,
                                   const Lay<PairKernel>& lay, SpanRows values, int32_t column,
                                   int32_t depth, Stream& next) {
    if (lay.value_size - column >= (C + 1) / 2 * 32)
      add_pairs<R, C>(acc, weights, values, column, depth, next, [](int) { return 0xffffffffu; });
    else
      add_pairs<R, C>(acc, weights, values, column, depth, next,
                      [&](int c) { return elements_left(lay.value_size - column - c * 16); });
  }

  static void pack_query(const kvell::Call& call, const kvell::Task& task,
                         const Lay<PairKernel>& lay) {
    uint32_t* to = lay.query;
    const int32_t group = call.group_heads();
    for (int32_t head = task.head_begin; head < task.head_end; ++head)
      for (int32_t token = task.token_begin; token < task.token_end; ++token)
        for (int32_t g = 0; g < group; ++g, to += lay.query_items)
          __builtin_memcpy(to,
                           static_cast<const uint16_t*>(call.query.data) +
                               token * call.query.token_stride +
                               (head * group + g) * call.query.head_stride,
                           lay.head_size * 2);
  }

  // `counted`: which positions of the span each row reads. Weights are rounded to bf16; the
  // denominator sums what was rounded, so they add up to 1.
  template <int R>
  KVELL_INLINE void weigh_rows(float (*scores)[kvell::kSpan], const kvell::Range* counted,
                               const kvell::Rule& rule, float* maximum, float* sums,
                               uint32_t (*weights)[kvell::kSpan / 2], float* factor) {
    Shift shifts[R];
    shift_rows<R>(scores, counted, rule, maximum, shifts);
    for (int r = 0; r < R; ++r) {
      factor[r] = shifts[r].factor;
      const __m512 scale = _mm512_set1_ps(shifts[r].scale), by = _mm512_set1_ps(shifts[r].by);
      __m512 sum = _mm512_mul_ps(_mm512_loadu_ps(sums + r * 16), _mm512_set1_ps(factor[r]));
      for (int i = 0; i < kvell::kSpan; i += 32) {
        const __m512 low = short_exp(_mm512_fmadd_ps(_mm512_load_ps(scores[r] + i), scale, by));
        const __m512 high = short_exp(_mm512_fmadd_ps(_mm512_load_ps(scores[r] + i + 16), scale, by));
        const __m512i pairs = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        _mm512_store_si512(weights[r] + i / 2, pairs);
        sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
        sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_and_si512(
                                     pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))));
      }
      _mm512_storeu_ps(sums + r * 16, sum);
    }
  }

  KVELL_INLINE __mmask32 elements_left(int32_t n) {
    return n >= 32 ? 0xffffffffu : n <= 0 ? 0u : (1u << n) - 1;
  }
  KVELL_INLINE __m512i load_row(const uint8_t* row, int32_t element, __mmask32 mask) {
    return _mm512_maskz_loadu_epi16(mask, row + element * 2);
  }

 private:
  // Indices that interleave elements [from, from+16) of two rows of 32.
  KVELL_INLINE __m512i pair_order(int from) {
    alignas(64) uint16_t order[32];
    for (int i = 0; i < 16; ++i) {
      order[2 * i] = static_cast<uint16_t>(from + i);
      order[2 * i + 1] = static_cast<uint16_t>(32 + from + i);
    }
    return _mm512_load_si512(order);
  }

  template <int R, int C, class Mask>
  KVELL_INLINE void add_pairs(__m512 (&acc)[R][C], const uint32_t* weights, SpanRows values,
                              int32_t column, int32_t depth, Stream& next, Mask mask) {
    const __m512i first = pair_order(0), second = pair_order(16);
    for (int32_t k = 0; k < depth; ++k) {
      const uint8_t *even = values[2 * k], *odd = values[2 * k + 1];
      next.advance(C);
      Items items[C];
      for (int c = 0; c < C; c += 2) {
        fetch_near(values + 2 * k, (column + c * 16) * 2);
        fetch_near(values + 2 * k + 1, (column + c * 16) * 2);
        const __m512i a = load_row(even, column + c * 16, mask(c));
        const __m512i b = load_row(odd, column + c * 16, mask(c));
        items[c] = items_of(_mm512_permutex2var_epi16(a, first, b));
        if (c + 1 < C) items[c + 1] = items_of(_mm512_permutex2var_epi16(a, second, b));
      }
      for (int r = 0; r < R; ++r) {
        const Items weight = broadcast(weights + r * (kvell::kSpan / 2) + k);
        for (int c = 0; c < C; ++c) acc[r][c] = multiply_add(acc[r][c], weight, items[c]);
      }
    }
  }
};

}  // namespace
