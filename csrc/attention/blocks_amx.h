// Kernel for pools and queries of bf16, up to 16 query rows at a time in tile registers.
//
//   scores, 16 positions × rows:   keys (as they lie in a page) · query rows, packed once
//   output, rows × 16 numbers:     weights · values, packed as pairs of neighbouring positions
//
// Keys need no packing: their rows are the left factor. What a span's rows of pages leave out (other
// sizes of pages, an end, heads that fill no whole tile) is copied first, with zeros in its place.
#pragma once
#include "cpu/tiles_amx.h"

#include "pairs_avx512.h"

namespace {

struct TileKernel {
  using Lanes = Avx512Lanes;
  using Item = uint32_t;
  using Own = Lay<TileKernel>;
  static constexpr int kPerItem = 2, kRows = 1, kColumns = 1;
  static constexpr int kChains = 1, kPageRows = 0, kBlockRows = kTileRows;
  static constexpr int kBlocks = kvell::kSpan / kTileRows;  // of positions, in a span
  static constexpr int kTileItems = kTileRows * kTilePairs;

  // Rows of keys as tiles read them, 16 positions each.
  struct SpanKeys {
    const uint8_t* rows[kBlocks];
    int64_t stride_bytes[kBlocks];
  };

  static int64_t chunks(int64_t row_items) { return (row_items + kTilePairs - 1) / kTilePairs; }
  // Copied keys, then a span's scores, positions first.
  static int64_t key_room(int64_t row_items) {
    return kvell::kSpan * (chunks(row_items) * kTilePairs + kTileRows);
  }
  static int64_t query_room(int64_t rows, int64_t kv_heads, int64_t row_items) {
    return (rows + (kTileRows - 1) * kv_heads) * chunks(row_items) * kTilePairs;
  }

  // Tiles [head][block of rows][chunk of items]: 16 items of a row are a column.
  static void pack_query(const kvell::Call& call, const kvell::Task& task, const Own& lay) {
    shaped_rows() = 0;
    const int32_t group = call.group_heads(), rows = task.tokens() * group;
    const auto* data = static_cast<const uint16_t*>(call.query.data);
    for (int32_t head = 0; head < task.heads(); ++head) {
      uint32_t* tiles = query_tiles(lay, head, 0, rows);
      if (rows % kTileRows != 0)
        __builtin_memset(query_tiles(lay, head, rows, rows), 0, chunks(lay.query_items) * kTileItems * 4);
      if (lay.query_items % kTilePairs != 0)
        __builtin_memset(tiles, 0, (rows + kTileRows - 1) / kTileRows * chunks(lay.query_items) * kTileItems * 4);
      for (int32_t row = 0; row < rows; ++row) {
        const uint16_t* from =
            data + (task.token_begin + row / group) * call.query.token_stride +
            ((task.head_begin + head) * group + row % group) * call.query.head_stride;
        uint32_t* to = query_tiles(lay, head, row, rows) + row % kTileRows;
        for (int32_t item = 0; item < lay.query_items; ++item)
          __builtin_memcpy(to + item * kTileRows, from + 2 * item, 4);
      }
    }
  }

  static SpanKeys span_keys(const Own& lay, SpanRows keys) {
    const int64_t row_bytes = lay.head_size * 2, padded = chunks(lay.query_items) * kTileRowBytes;
    SpanKeys span;
    uint8_t* copies = reinterpret_cast<uint8_t*>(lay.keys);
    for (int b = 0; b < kBlocks; ++b, keys += kTileRows, copies += kTileRows * padded) {
      if (row_bytes == padded && lies_in_a_row(keys, row_bytes)) {
        span.rows[b] = keys[0];
        span.stride_bytes[b] = row_bytes;
        continue;
      }
      for (int i = 0; i < kTileRows; ++i) {
        __builtin_memcpy(copies + i * padded, keys[i], row_bytes);
        __builtin_memset(copies + i * padded + row_bytes, 0, padded - row_bytes);
      }
      span.rows[b] = copies;
      span.stride_bytes[b] = padded;
    }
    return span;
  }

  static void pack_values(const Own& lay, SpanRows rows, Stream& next) {
    const __m512i first = PairKernel::pair_order(0), second = PairKernel::pair_order(16);
    const int32_t tiles = lay.padded_size / kTileRows;
    for (int i = 0; i < kvell::kSpan; i += 2) {
      next.advance((lay.value_size + 15) / 16);
      uint32_t* to = lay.values + i / 2 / kTilePairs * tiles * kTileItems + i / 2 % kTilePairs * kTileRows;
      for (int32_t d = 0; d < lay.padded_size; d += 32, to += 2 * kTileItems) {
        const __mmask32 mask = PairKernel::elements_left(lay.value_size - d);
        const __m512i a = PairKernel::load_row(rows[i], d, mask);
        const __m512i b = PairKernel::load_row(rows[i + 1], d, mask);
        _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, first, b));
        if (d + 16 < lay.padded_size)
          _mm512_storeu_si512(to + kTileItems, _mm512_permutex2var_epi16(a, second, b));
      }
    }
  }

  // `next` is null when others have fetched what follows.
  static void block_scores(const Own& lay, int32_t head, int32_t row, int32_t rows,
                           int32_t rows_per_head, const SpanKeys& keys, Stream* next,
                           float (*scores)[kvell::kSpan]) {
    shape(rows);
    const uint32_t* query = query_tiles(lay, head, row, rows_per_head);
    const int64_t count = chunks(lay.query_items);
    float* found = reinterpret_cast<float*>(lay.keys + kvell::kSpan * count * kTilePairs);
    before_tiles();
    for (int b = 0; b < kBlocks; b += 2) {
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t chunk = 0; chunk < count; ++chunk) {
        _tile_loadd(3, query + chunk * kTileItems, kTileRowBytes);
        if (next) next->advance(kTileRows);
        _tile_loadd(2, keys.rows[b] + chunk * kTileRowBytes, keys.stride_bytes[b]);
        _tile_dpbf16ps(0, 2, 3);
        if (next) next->advance(kTileRows);
        _tile_loadd(2, keys.rows[b + 1] + chunk * kTileRowBytes, keys.stride_bytes[b + 1]);
        _tile_dpbf16ps(1, 2, 3);
      }
      _tile_stored(0, found + b * kTileItems, kTileRowBytes);
      _tile_stored(1, found + (b + 1) * kTileItems, kTileRowBytes);
    }
    for (int b = 0; b < kBlocks; ++b)
      for (int32_t r = 0; r < rows; r += 4)
        four_columns(found + b * kTileItems + r, scores[r] + b * kTileRows);
  }

  // output[row] = factor · output[row] + weights · values, for `rows` rows.
  static void add_block(const Own& lay, int32_t row, int32_t rows,
                        const uint32_t (*weights)[kvell::kSpan / 2], const float* factor) {
    const int64_t size = lay.padded_size;
    float* out = lay.output + row * size;
    for (int32_t r = 0; r < rows; ++r)
      if (factor[r] != 1.0f)
        for (int64_t d = 0; d < size; d += kTileRows)
          _mm512_store_ps(out + r * size + d, _mm512_mul_ps(_mm512_load_ps(out + r * size + d),
                                                            _mm512_set1_ps(factor[r])));
    before_tiles();
    _tile_loadd(4, weights[0], kvell::kSpan * 2);
    _tile_loadd(5, weights[0] + kTilePairs, kvell::kSpan * 2);
    const uint32_t *early = lay.values, *late = early + size * kTilePairs;
    int64_t d = 0;
    for (; d + 2 * kTileRows <= size; d += 2 * kTileRows) {
      _tile_loadd(6, out + d, size * 4);
      _tile_loadd(7, out + d + kTileRows, size * 4);
      _tile_loadd(0, early + d * kTilePairs, kTileRowBytes);
      _tile_dpbf16ps(6, 4, 0);
      _tile_loadd(1, early + (d + kTileRows) * kTilePairs, kTileRowBytes);
      _tile_dpbf16ps(7, 4, 1);
      _tile_loadd(2, late + d * kTilePairs, kTileRowBytes);
      _tile_dpbf16ps(6, 5, 2);
      _tile_loadd(3, late + (d + kTileRows) * kTilePairs, kTileRowBytes);
      _tile_dpbf16ps(7, 5, 3);
      _tile_stored(6, out + d, size * 4);
      _tile_stored(7, out + d + kTileRows, size * 4);
    }
    if (d == size) return;
    _tile_loadd(6, out + d, size * 4);
    _tile_loadd(0, early + d * kTilePairs, kTileRowBytes);
    _tile_dpbf16ps(6, 4, 0);
    _tile_loadd(2, late + d * kTilePairs, kTileRowBytes);
    _tile_dpbf16ps(6, 5, 2);
    _tile_stored(6, out + d, size * 4);
  }

  KVELL_INLINE void pack_weights(const float* weights, uint32_t* items, float factor, float* sums) {
    PairKernel::pack_weights(weights, items, factor, sums);
  }

 private:
  // Rows of queries that this thread's tiles are shaped for; 0: others may have shaped them.
  static int32_t& shaped_rows() {
    thread_local int32_t rows = 0;
    return rows;
  }

  // Scores 0 and 1 of keys 2 and a query 3; output 6 and 7 of weights 4 and 5 and values 0 to 3.
  static void shape(int32_t rows) {
    if (shaped_rows() == rows) return;
    shaped_rows() = rows;
    TileShapes shapes;
    for (int tile : {0, 1, 2, 3}) shapes.set(tile, kTileRows);
    for (int tile : {4, 5, 6, 7}) shapes.set(tile, rows);
    shapes.load();
  }

  // The tiles of the block that has a head's row.
  static uint32_t* query_tiles(const Own& lay, int32_t head, int32_t row, int32_t rows_per_head) {
    const int64_t blocks = (rows_per_head + kTileRows - 1) / kTileRows;
    return lay.query + (head * blocks + row / kTileRows) * chunks(lay.query_items) * kTileItems;
  }

  static bool lies_in_a_row(SpanRows rows, int64_t row_bytes) {
    for (int i = 1; i < kTileRows; ++i)
      if (rows[i] != rows[i - 1] + row_bytes) return false;
    return true;
  }

  // Columns of 16 rows of 16 become rows of 16, a span apart: four of them.
  KVELL_INLINE void four_columns(const float* from, float* to) {
    __m512 four[4];  // numbers 4 j + i of each column, for j = 0 … 3
    for (int i = 0; i < 4; ++i) {
      const float* at = from + i * kTileRows;
      __m512 x = _mm512_castps128_ps512(_mm_loadu_ps(at));
      x = _mm512_insertf32x4(x, _mm_loadu_ps(at + 4 * kTileRows), 1);
      x = _mm512_insertf32x4(x, _mm_loadu_ps(at + 8 * kTileRows), 2);
      four[i] = _mm512_insertf32x4(x, _mm_loadu_ps(at + 12 * kTileRows), 3);
    }
    const __m512d low = _mm512_castps_pd(_mm512_unpacklo_ps(four[0], four[1]));
    const __m512d low_too = _mm512_castps_pd(_mm512_unpacklo_ps(four[2], four[3]));
    const __m512d high = _mm512_castps_pd(_mm512_unpackhi_ps(four[0], four[1]));
    const __m512d high_too = _mm512_castps_pd(_mm512_unpackhi_ps(four[2], four[3]));
    const __m512d rows[4] = {_mm512_unpacklo_pd(low, low_too), _mm512_unpackhi_pd(low, low_too),
                             _mm512_unpacklo_pd(high, high_too), _mm512_unpackhi_pd(high, high_too)};
    for (int r = 0; r < 4; ++r) _mm512_store_ps(to + r * kvell::kSpan, _mm512_castpd_ps(rows[r]));
  }
};

}  // namespace
