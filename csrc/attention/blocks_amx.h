// Kernel for pools and queries of bf16, up to 16 query rows at a time in tile registers.
//
//   scores, 16 positions × rows:   keys · query rows                (packed once, by pairs)
//   output, rows × 16 numbers:     weights · values, even numbers;   the same, odd numbers
//
// Neither keys nor values are packed: keys are a left factor, whose rows are positions, and a row of
// values is a right factor's row of pairs, of which weights with a zero beside them take the even or
// the odd ones. What pages do not hold in sixteen rows one after the other (other sizes of pages, an
// end, heads that fill no whole tile) is copied first, with zeros in place of what is missing.
//
// Prompts, of more rows than a tile has, pack once for all their rows: keys are turned, and of 32
// positions' values number i stands beside number 16 + i, which halves the products. A sum of sixteen
// pairs is that of their first halves, then that of the others, then both: so two tiles of positions
// whose weights stand beside zeros make the same sum, bit by bit, as one of pairs.
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
  static constexpr int kHalves = kBlocks / 2;               // of as many positions as are paired
  static constexpr int kTileItems = kTileRows * kTilePairs;
  static constexpr int kLinesAtOnce = 6;  // fetched, of two times for a tile's sixteen
  static constexpr int kLinesBetween = 4;  // fetched where vectors are at work for as long as half a tile

  static int64_t chunks(int64_t row_items) { return (row_items + kTilePairs - 1) / kTilePairs; }
  // Copied keys, the same as a right factor, then a span's scores, positions first.
  static int64_t key_room(int64_t row_items) {
    return kvell::kSpan * (2 * chunks(row_items) * kTilePairs + kTileRows);
  }
  // Copied values, then the same in pairs of positions.
  static int64_t value_room(int64_t padded_size) { return 2 * kvell::kSpan * padded_size / kPerItem; }
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
  static void place_values(const Own& lay, SpanRows found, bool whole, int64_t at,
                           int32_t rows_per_head, Stream& next, Rows& values) {
    place(lay, found, whole, at, lay.value_size * 2, lay.padded_size * 2, lay.values, values);
    if (rows_per_head > kTileRows) pair_values(lay, values, next);
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
    if (rows_per_head > kTileRows)
      return scores_of_turned(lay, query_row(lay, head * rows_per_head + row), next, scores);
    shape(rows);
    const uint32_t* query = query_tiles(lay, head);
    const int64_t count = chunks(lay.query_items);
    float* found = reinterpret_cast<float*>(lay.keys + 2 * kvell::kSpan * count * kTilePairs);
    before_tiles();
    for (int b = 0; b < kBlocks; ++b) {
      _tile_zero(0);
      for (int64_t chunk = 0; chunk < count; ++chunk) {
        if (next) next->advance_once(kLinesAtOnce);
        _tile_loadd(3, query + chunk * kTileItems, kTileRowBytes);
        if (next) next->advance_once(kLinesAtOnce);
        _tile_loadd(2, keys.at[b] + chunk * kTileRowBytes, keys.stride_bytes);
        _tile_dpbf16ps(0, 2, 3);
      }
      _tile_stored(0, found + b * kTileItems, kTileRowBytes);
    }
    for (int b = 0; b < kBlocks; ++b)
      for (int32_t r = 0; r < rows; r += 4) {
        if (next) next->advance_once(kLinesBetween);
        four_columns(found + b * kTileItems + r, scores[r] + b * kTileRows);
      }
  }

  static void weigh_block(float (*scores)[kvell::kSpan], int32_t rows, int32_t rows_per_head,
                          const kvell::Range* counted, const kvell::Rule& rule, float* maximum,
                          Weights& weights, float* factor, Stream* next, int lines_of_row) {
    const auto between = [&]() __attribute__((always_inline)) {
      if (next) next->advance_once(lines_of_row / kPartsOfRow);
    };
    if (rows_per_head > kTileRows)
      ::weigh_block<true>(scores, rows, counted, rule, maximum, weights, factor, between);
    else
      ::weigh_block<false>(scores, rows, counted, rule, maximum, weights, factor, between);
  }

  // output[row] = factor · output[row] + weights · values, for `rows` rows from `begin` of a block
  // on that begins at `first`: of every 32 numbers the even ones, then the odd ones. What a span adds
  // begins at nothing, so tiles wait for no output, and its sums join it behind. The denominator is a
  // number more, of values that are all one: it sums what was rounded, so weights add up to 1.
  static void add_block(const Own& lay, int32_t first, int32_t begin, int32_t rows,
                        const Weights& weights, const float* factor, const Rows& values,
                        Stream* next) {
    shape(rows);
    const Joined joined{lay, first + begin, rows, factor + begin};
    const uint32_t *even = weights.even[begin], *odd = weights.odd[begin];
    constexpr int64_t kStride = sizeof weights.even[0];
    alignas(64) float sums[4][kTileItems];
    before_tiles();
    _tile_loadd(0, ones().column, kTileRowBytes);
    for (int half = 0; half < kHalves; ++half) {
      _tile_loadd(4, even + (2 * half) * kTileRows, kStride);
      _tile_loadd(5, even + (2 * half + 1) * kTileRows, kStride);
      if (half == 0) {
        _tile_zero(6);
        _tile_dpbf16ps(6, 4, 0);
        _tile_dpbf16ps(6, 5, 0);
      } else {
        _tile_zero(7);
        _tile_dpbf16ps(7, 4, 0);
        _tile_dpbf16ps(7, 5, 0);
      }
    }
    _tile_stored(6, sums[0], kTileRowBytes);
    _tile_stored(7, sums[1], kTileRowBytes);
    joined.denominators(sums[0], sums[1]);
    for (int64_t d = 0; d < lay.padded_size; d += kSizes) {
      for (int half = 0; half < kHalves; ++half) {
        before_tiles();
        _tile_zero(6);
        _tile_zero(7);
        for (int b = 2 * half; b < 2 * half + 2; ++b) {
          if (next) next->advance_once(kLinesAtOnce);
          _tile_loadd(0, values.at[b] + d * 2, values.stride_bytes);
          _tile_loadd(4, even + b * kTileRows, kStride);
          _tile_dpbf16ps(6, 4, 0);
          if (next) next->advance_once(kLinesAtOnce);
          _tile_loadd(5, odd + b * kTileRows, kStride);
          _tile_dpbf16ps(7, 5, 0);
        }
        _tile_stored(6, sums[half], kTileRowBytes);
        _tile_stored(7, sums[2 + half], kTileRowBytes);
      }
      if (next) next->advance_once(kLinesBetween);
      joined.numbers(d, sums[0], sums[1]);
      if (next) next->advance_once(kLinesBetween);
      joined.numbers(d + kTileRows, sums[2], sums[3]);
    }
  }

  // The same sums of values in pairs, for `rows` rows from `begin` of a block of a head's many rows.
  static void add_pairs(const Own& lay, int32_t first, int32_t begin, int32_t rows, const Weights& weights,
                        const float* factor) {
    // What lies behind the last row makes sums that join nothing.
    shape(kTileRows);
    const Joined joined{lay, first + begin, rows, factor + begin};
    const uint32_t* pairs = weights.pairs[begin];
    const uint32_t* values = paired_values(lay);
    const int64_t half = lay.padded_size / kSizes * 2 * kTileItems;
    constexpr int64_t kStride = sizeof weights.pairs[0];
    alignas(64) float sums[2][2][kTileItems], added[kTileItems];
    before_tiles();
    _tile_loadd(4, pairs, kStride);
    _tile_loadd(5, pairs + kTilePairs, kStride);
    _tile_zero(6);
    _tile_loadd(0, ones().column, kTileRowBytes);
    _tile_dpbf16ps(6, 4, 0);
    _tile_dpbf16ps(6, 5, 0);
    _tile_stored(6, added, kTileRowBytes);
    const auto join = [&](int64_t d, int64_t turn) {
      joined.numbers(d, sums[turn][0], nullptr);
      joined.numbers(d + kTileRows, sums[turn][1], nullptr);
    };
    for (int64_t d = 0, turn = 0; d < lay.padded_size; d += kSizes, values += 2 * kTileItems, turn ^= 1) {
      _tile_zero(6);
      _tile_zero(7);
      _tile_loadd(0, values, kTileRowBytes);
      _tile_dpbf16ps(6, 4, 0);
      _tile_loadd(1, values + kTileItems, kTileRowBytes);
      _tile_dpbf16ps(7, 4, 1);
      _tile_loadd(2, values + half, kTileRowBytes);
      _tile_dpbf16ps(6, 5, 2);
      _tile_loadd(3, values + half + kTileItems, kTileRowBytes);
      _tile_dpbf16ps(7, 5, 3);
      _tile_stored(6, sums[turn][0], kTileRowBytes);
      _tile_stored(7, sums[turn][1], kTileRowBytes);
      if (d > 0) join(d - kSizes, turn ^ 1);
      if (d + kSizes == lay.padded_size) join(d, turn);
    }
    joined.denominators(added, nullptr);
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

  // The opposite: the even ones first, then the odd ones.
  static void put_apart(float* row, int32_t size) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (int32_t d = 0; d < size; d += kSizes) {
      const __m512 first = _mm512_load_ps(row + d), second = _mm512_load_ps(row + d + kTileRows);
      _mm512_store_ps(row + d, _mm512_permutex2var_ps(first, even, second));
      _mm512_store_ps(row + d + kTileRows, _mm512_permutex2var_ps(first, odd, second));
    }
  }

 private:
  // Rows of queries that this thread's tiles are shaped for; 0: others may have shaped them.
  static int32_t& shaped_rows() {
    thread_local int32_t rows = 0;
    return rows;
  }

  // Scores 0 of keys 2 and a query 3, or 0 to 3 of a query 4 and keys 5 to 7; what joins the output, 6 and
  // 7, of weights 4 and 5 and values 0 to 3.
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

  // The same products and sums as of keys that are not turned. Sixteen rows always: shapes are kept, and
  // what lies behind the last row makes scores that nobody reads.
  static void scores_of_turned(const Own& lay, const uint32_t* query, Stream* next,
                               float (*scores)[kvell::kSpan]) {
    static_assert(kBlocks == 4);
    const int64_t count = chunks(lay.query_items), stride = count * kTileRowBytes;
    const int64_t block = count * kTileItems;
    const uint32_t* keys = turned_keys(lay);
    shape(kTileRows);
    before_tiles();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t chunk = 0; chunk < count; ++chunk, keys += kTileItems) {
      if (next) next->advance_once(2 * kLinesAtOnce);
      _tile_loadd(4, query + chunk * kTilePairs, stride);
      _tile_loadd(5, keys, kTileRowBytes);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, keys + block, kTileRowBytes);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, keys + 2 * block, kTileRowBytes);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, keys + 3 * block, kTileRowBytes);
      _tile_dpbf16ps(3, 4, 5);
    }
    float* to = scores[0];
    _tile_stored(0, to, kvell::kSpan * 4);
    _tile_stored(1, to + kTileRows, kvell::kSpan * 4);
    _tile_stored(2, to + 2 * kTileRows, kvell::kSpan * 4);
    _tile_stored(3, to + 3 * kTileRows, kvell::kSpan * 4);
  }

  static uint32_t* paired_values(const Own& lay) {
    return lay.values + kvell::kSpan * lay.padded_size / kPerItem;
  }

  // Tiles [half of the span][32 numbers][even, odd ones] of pairs of positions.
  static void pair_values(const Own& lay, const Rows& values, Stream& next) {
    constexpr __mmask32 second = 0xaaaaaaaa;
    const int64_t chunks = lay.padded_size / kSizes, stride = values.stride_bytes;
    for (int half = 0; half < kHalves; ++half)
      for (int i = 0; i < kTilePairs; ++i) {
        const uint8_t *one = values.at[2 * half] + i * stride, *other = values.at[2 * half + 1] + i * stride;
        uint32_t* to = paired_values(lay) + 2 * kTileItems * chunks * half + i * kTilePairs;
        for (int64_t chunk = 0; chunk < chunks; ++chunk, to += 2 * kTileItems) {
          next.advance_once(2);
          const __m512i a = _mm512_loadu_si512(one + chunk * kTileRowBytes);
          const __m512i b = _mm512_loadu_si512(other + chunk * kTileRowBytes);
          _mm512_store_si512(to, _mm512_mask_blend_epi16(second, a, _mm512_slli_epi32(b, 16)));
          _mm512_store_si512(to + kTileItems,
                             _mm512_mask_blend_epi16(second, _mm512_srli_epi32(a, 16), b));
        }
      }
  }

  // Output and denominators of some rows, as a span's sums join them: one tile of these, or two.
  struct Joined {
    const Own& lay;
    int32_t first, rows;
    const float* factor;

    void numbers(int64_t d, const float* sums, const float* others) const {
      join(lay.output + first * lay.padded_size + d, lay.padded_size, sums, others);
    }
    void denominators(const float* sums, const float* others) const {
      join(lay.sums + first * kTileRows, kTileRows, sums, others);
    }

   private:
    inline __attribute__((always_inline)) void join(float* out, int64_t stride, const float* sums,
                                                    const float* others) const {
      for (int32_t r = 0; r < rows; ++r, out += stride) {
        __m512 sum = _mm512_load_ps(sums + r * kTileRows);
        if (others) sum = _mm512_add_ps(sum, _mm512_load_ps(others + r * kTileRows));
        _mm512_store_ps(out, _mm512_fmadd_ps(_mm512_load_ps(out), _mm512_set1_ps(factor[r]), sum));
      }
    }
  };

  // Pairs of ones in the first column of a tile.
  struct Ones {
    alignas(64) uint32_t column[kTileItems] = {};
    constexpr Ones() {
      for (int i = 0; i < kTileItems; i += kTilePairs) column[i] = 0x3f803f80;
    }
  };
  static const Ones& ones() {
    static constexpr Ones instance;
    return instance;
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
