// Kernel for pools and queries of bf16, up to 16 query rows at a time in tile registers.
//
//   scores, 16 positions × rows:   keys · query rows                (packed once, by pairs)
//   output, rows × 16 numbers:     weights · values, even numbers;   the same, odd numbers
//
// Neither keys nor values are packed: keys are a left factor, whose rows are positions, and a row of
// values is a right factor's row of pairs, of which weights with a zero beside them take the even or
// the odd ones. What pages do not hold in sixteen rows one after the other (other sizes of pages, an
// end, heads that fill no whole tile) is copied first, with zeros in place of what is missing.
#pragma once
#include "cpu/tiles_amx.h"

#include "pairs_avx512.h"
#include "weights_avx512.h"

namespace {

struct TileKernel {
  using Lanes = Avx512Lanes;
  using Item = uint32_t;
  using Own = Lay<TileKernel>;
  static constexpr int kPerItem = 2, kPageRows = 0, kBlockRows = kTileRows;
  static constexpr int kSizes = 2 * kTilePairs;             // numbers of a row in a tile
  static constexpr int kBlocks = kvell::kSpan / kTileRows;  // of positions, in a span
  static constexpr int kTileItems = kTileRows * kTilePairs;
  static constexpr int kLinesAtOnce = 6;  // fetched, of two times for a tile's sixteen

  static int64_t chunks(int64_t row_items) { return (row_items + kTilePairs - 1) / kTilePairs; }
  // Copied keys, the same as a right factor, then a span's scores, positions first.
  static int64_t key_room(int64_t row_items) {
    return kvell::kSpan * (2 * chunks(row_items) * kTilePairs + kTileRows);
  }
  static int64_t value_room(int64_t padded_size) { return kvell::kSpan * padded_size / kPerItem; }
  static int64_t query_room(int64_t rows, int64_t kv_heads, int64_t row_items) {
    return (rows + (kTileRows - 1) * kv_heads) * chunks(row_items) * kTilePairs;
  }

  // Rows of a span as tiles read them: 16 positions each.
  struct Rows {
    const uint8_t* at[kBlocks];
    int64_t stride_bytes;
  };

  // One head's rows of a span, `at` bytes behind those that were found (null: not to be read).
  static void place_keys(const Own& lay, SpanRows found, bool whole, int64_t at,
                         int32_t rows_per_head, Rows& keys) {
    const int64_t used = lay.head_size * 2, padded = chunks(lay.query_items) * kTileRowBytes;
    place(lay, found, whole, at, used, padded, lay.keys, keys);
    if (rows_per_head > kTileRows) turn_keys(lay, keys);
  }
  static void place_values(const Own& lay, SpanRows found, bool whole, int64_t at, Rows& values) {
    place(lay, found, whole, at, lay.value_size * 2, lay.padded_size * 2, lay.values, values);
  }

  using Weights = BlockWeights;

  // Up to 16 rows of a head: tiles [head][chunk of items] whose columns are rows. More: rows
  // [row][item], for keys that are turned once for all of them.
  static void pack_query(const kvell::Call& call, const kvell::Task& task, const Own& lay) {
    shaped_rows() = 0;
    const int32_t group = call.group_heads(), rows = task.tokens() * group;
    const bool as_columns = rows <= kTileRows;
    const int64_t padded = chunks(lay.query_items) * kTilePairs;
    const int64_t room = task.heads() * (as_columns ? kTileRows : rows) * padded;
    if (as_columns || padded > lay.query_items) __builtin_memset(lay.query, 0, room * 4);
    for (int32_t head = 0; head < task.heads(); ++head)
      for (int32_t row = 0; row < rows; ++row) {
        const uint16_t* from =
            static_cast<const uint16_t*>(call.query.data) +
            (task.token_begin + row / group) * call.query.token_stride +
            ((task.head_begin + head) * group + row % group) * call.query.head_stride;
        if (as_columns)
          put_column(query_tiles(lay, head) + row, from, lay.query_items);
        else
          __builtin_memcpy(query_row(lay, head * rows + row), from, lay.query_items * 4);
      }
  }

  // `next` is null when others have fetched what follows.
  static void block_scores(const Own& lay, int32_t head, int32_t row, int32_t rows,
                           int32_t rows_per_head, const Rows& keys, Stream* next,
                           float (*scores)[kvell::kSpan]) {
    shape(rows);
    if (rows_per_head > kTileRows)
      return scores_of_turned(lay, query_row(lay, head * rows_per_head + row), next, scores);
    const uint32_t* query = query_tiles(lay, head);
    const int64_t count = chunks(lay.query_items);
    float* found = reinterpret_cast<float*>(lay.keys + 2 * kvell::kSpan * count * kTilePairs);
    before_tiles();
    for (int b = 0; b < kBlocks; ++b) {
      _tile_zero(0);
      for (int64_t chunk = 0; chunk < count; ++chunk) {
        if (next) next->advance(kLinesAtOnce);
        _tile_loadd(3, query + chunk * kTileItems, kTileRowBytes);
        if (next) next->advance(kLinesAtOnce);
        _tile_loadd(2, keys.at[b] + chunk * kTileRowBytes, keys.stride_bytes);
        _tile_dpbf16ps(0, 2, 3);
      }
      _tile_stored(0, found + b * kTileItems, kTileRowBytes);
    }
    for (int b = 0; b < kBlocks; ++b)
      for (int32_t r = 0; r < rows; r += 4)
        four_columns(found + b * kTileItems + r, scores[r] + b * kTileRows);
  }

  static void weigh_block(float (*scores)[kvell::kSpan], int32_t rows, const kvell::Range* counted,
                          const kvell::Rule& rule, float* maximum, float* sums, Weights& weights,
                          float* factor) {
    ::weigh_block(scores, rows, counted, rule, maximum, sums, weights, factor);
  }

  // output[row] = factor · output[row] + weights · values, for `rows` rows from `begin` of a block
  // on that begins at `first`: of every 32 numbers the even ones, then the odd ones.
  static void add_block(const Own& lay, int32_t first, int32_t begin, int32_t rows,
                        const Weights& weights, const float* factor, const Rows& values,
                        Stream* next) {
    shape(rows);
    const int64_t size = lay.padded_size;
    float* out = lay.output + (first + begin) * size;
    factor += begin;
    for (int32_t r = 0; r < rows; ++r)
      if (factor[r] != 1.0f)
        for (int64_t d = 0; d < size; d += kTileRows)
          _mm512_store_ps(out + r * size + d, _mm512_mul_ps(_mm512_load_ps(out + r * size + d),
                                                            _mm512_set1_ps(factor[r])));
    constexpr int64_t kWeightStride = kvell::kSpan * 4;
    before_tiles();
    for (int64_t d = 0; d < size; d += kSizes) {
      _tile_loadd(6, out + d, size * 4);
      _tile_loadd(7, out + d + kTileRows, size * 4);
      for (int b = 0; b < kBlocks; ++b) {
        if (next) next->advance(kLinesAtOnce);
        _tile_loadd(0, values.at[b] + d * 2, values.stride_bytes);
        _tile_loadd(4, weights.even[begin] + b * kTileRows, kWeightStride);
        _tile_dpbf16ps(6, 4, 0);
        if (next) next->advance(kLinesAtOnce);
        _tile_loadd(5, weights.odd[begin] + b * kTileRows, kWeightStride);
        _tile_dpbf16ps(7, 5, 0);
      }
      _tile_stored(6, out + d, size * 4);
      _tile_stored(7, out + d + kTileRows, size * 4);
    }
  }

  // Of every 32 numbers, the even ones and the odd ones come together again.
  static void put_in_order(float* row, int32_t size) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int32_t d = 0; d < size; d += kSizes) {
      const __m512 even = _mm512_load_ps(row + d), odd = _mm512_load_ps(row + d + kTileRows);
      _mm512_store_ps(row + d, _mm512_permutex2var_ps(even, low, odd));
      _mm512_store_ps(row + d + kTileRows, _mm512_permutex2var_ps(even, high, odd));
    }
  }

 private:
  // Rows of queries that this thread's tiles are shaped for; 0: others may have shaped them.
  static int32_t& shaped_rows() {
    thread_local int32_t rows = 0;
    return rows;
  }

  // Scores 0 of keys 2 and a query 3, or 6 of a query 4 and keys 0; output 6 and 7 of weights 4 and 5
  // and values 0.
  static void shape(int32_t rows) {
    if (shaped_rows() == rows) return;
    shaped_rows() = rows;
    TileShapes shapes;
    for (int tile : {0, 1, 2, 3}) shapes.set(tile, kTileRows);
    for (int tile : {4, 5, 6, 7}) shapes.set(tile, rows);
    shapes.load();
  }

  static uint32_t* query_tiles(const Own& lay, int32_t head) {
    return lay.query + head * chunks(lay.query_items) * kTileItems;
  }

  static uint32_t* query_row(const Own& lay, int64_t row) {
    return lay.query + row * chunks(lay.query_items) * kTilePairs;
  }

  KVELL_INLINE void put_column(uint32_t* to, const uint16_t* from, int32_t items) {
    for (int32_t item = 0; item < items; ++item)
      __builtin_memcpy(to + item * kTileRows, from + 2 * item, 4);
  }

  static uint32_t* turned_keys(const Own& lay) {
    return lay.keys + kvell::kSpan * chunks(lay.query_items) * kTilePairs;
  }

  // Tiles [block of positions][chunk of items] whose columns are positions.
  static void turn_keys(const Own& lay, const Rows& keys) {
    const int64_t count = chunks(lay.query_items);
    uint32_t* to = turned_keys(lay);
    for (int b = 0; b < kBlocks; ++b)
      for (int64_t chunk = 0; chunk < count; ++chunk, to += kTileItems) {
        __m512i rows[kTileRows];
        for (int i = 0; i < kTileRows; ++i)
          rows[i] = _mm512_loadu_si512(keys.at[b] + i * keys.stride_bytes + chunk * kTileRowBytes);
        transpose16(rows);
        for (int i = 0; i < kTileRows; ++i) _mm512_store_si512(to + i * kTilePairs, rows[i]);
      }
  }

  // The same products and sums as of keys that are not turned.
  static void scores_of_turned(const Own& lay, const uint32_t* query, Stream* next,
                               float (*scores)[kvell::kSpan]) {
    const int64_t count = chunks(lay.query_items), stride = count * kTileRowBytes;
    const uint32_t* keys = turned_keys(lay);
    before_tiles();
    for (int b = 0; b < kBlocks; ++b) {
      _tile_zero(6);
      for (int64_t chunk = 0; chunk < count; ++chunk, keys += kTileItems) {
        if (next) next->advance(2 * kLinesAtOnce);
        _tile_loadd(4, query + chunk * kTilePairs, stride);
        _tile_loadd(0, keys, kTileRowBytes);
        _tile_dpbf16ps(6, 4, 0);
      }
      _tile_stored(6, scores[0] + b * kTileRows, kvell::kSpan * 4);
    }
  }

  // Where sixteen positions lie in one page they stay there; else they are copied into `room`.
  static void place(const Own& lay, SpanRows found, bool whole, int64_t at, int64_t used_bytes,
                    int64_t padded_bytes, uint32_t* room, Rows& rows) {
    if (whole && used_bytes == padded_bytes && lay.call.layer.page_tokens % kTileRows == 0) {
      rows.stride_bytes = lay.call.layer.row_bytes();
      for (int b = 0; b < kBlocks; ++b) rows.at[b] = found[b * kTileRows] + at;
      return;
    }
    uint8_t* copy = reinterpret_cast<uint8_t*>(room);
    rows.stride_bytes = padded_bytes;
    for (int b = 0; b < kBlocks; ++b) rows.at[b] = copy + b * kTileRows * padded_bytes;
    for (int i = 0; i < kvell::kSpan; ++i, copy += padded_bytes) {
      const int64_t held = found[i] ? used_bytes : 0;
      const uint8_t* from = found[i] ? found[i] + at : copy;
      for (int64_t byte = 0; byte < padded_bytes; byte += kTileRowBytes)
        _mm512_store_si512(copy + byte,
                           PairKernel::load_row(from + byte, 0,
                                                PairKernel::elements_left((held - byte) / 2)));
    }
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
