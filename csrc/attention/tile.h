// Attention of one task over its pages, for any kernel K.
//
// K says how a pool's elements become *items* (32 bits: one float, or two bf16 that one
// instruction multiplies and adds), and gives lanes, register tile and packing:
//   K::Lanes, K::Item, K::kPerItem, K::kRows × K::kColumns registers of accumulators
//   K::multiply_add(acc, item, items), K::pack_keys, K::pack_values, K::pack_query,
//   K::weigh_rows (scores → weights as items, adds them to the rows' lane sums),
//   K::kChains: how many sums a score consists of
//   K::kPageRows > 0: so many rows read pages, through widen_query, scores_from_pages and
//   add_from_pages, which do the same arithmetic in the same order without packing
//   K::kBlockRows > 0: rows are multiplied so many at a time, whatever their number, by
//   block_scores, weigh_block and add_block, those of more rows than a block by add_pairs;
//   K::Rows are a span's keys or values
//
// A weight of zero is no mask: zero times NaN is NaN. Where rows of a task read different positions of a
// span and one of these holds what is no number, each token's rows take the span by themselves, with
// zeros in place of what they do not read (spoils_a_row, attend_apart).
#pragma once
#include <cstdint>

#include "lay.h"
#include "softmax.h"
#include "stream.h"

namespace {

using kvell::Call;
using kvell::Fold;
using kvell::kSection;
using kvell::kSpan;
using kvell::Range;
using kvell::Task;

// acc[r][c] += Σ_k a[r][k] · b[k][c] for k = 0, Step, 2 Step …, in this order, whatever R and C are.
template <class K, int R, int C, int Step = 1>
static inline __attribute__((always_inline)) void multiply(
    typename K::Lanes::Vec (&acc)[R][C], const typename K::Item* a, int64_t a_stride,
    const typename K::Item* b, int64_t b_stride, int32_t depth) {
  for (int32_t k = 0; k < depth; k += Step) {
    typename K::Items column[C];
    for (int c = 0; c < C; ++c) column[c] = K::load(b + k * b_stride + c * K::Lanes::kWidth);
    for (int r = 0; r < R; ++r) {
      const auto item = K::broadcast(a + r * a_stride + k);
      for (int c = 0; c < C; ++c) acc[r][c] = K::multiply_add(acc[r][c], item, column[c]);
    }
  }
}

// How many of some words, of which a number's exponent is `exponent`, are infinite or NaN.
template <class Word>
KVELL_INLINE int32_t count_broken(const uint8_t* from, int32_t words, Word exponent) {
  int32_t broken = 0;
  for (int32_t i = 0; i < words; ++i) {
    Word word;
    __builtin_memcpy(&word, from + i * sizeof(Word), sizeof(Word));
    broken += (word & exponent) == exponent;
  }
  return broken;
}

// Can a stored value be multiplied by zero without becoming NaN?
static bool is_numbers(const kvell::Layer& layer, const uint8_t* row) {
  switch (layer.element) {
    case kvell::Element::float32: return !count_broken<uint32_t>(row, layer.value_size(), 0x7f800000u);
    case kvell::Element::bfloat16: return !count_broken<uint16_t>(row, layer.value_size(), 0x7f80u);
    default: break;
  }
  // Stored numbers are below 512: a scale from 2^113 on may make them infinite.
  return !count_broken<uint32_t>(row + layer.head_size, 1, 0x78000000u);
}

// A block of rows on its way from scores to output.
template <class K>
struct Block {
  // Heads of three or five rows leave the last one's fours of rows more room than they fill.
  alignas(64) float scores[K::kBlockRows + 4][kSpan];
  typename K::Weights weights;
  float factor[K::kBlockRows];
};

template <class K>
class Tile {
  using L = typename K::Lanes;
  using Vec = typename L::Vec;
  using Item = typename K::Item;
  static constexpr int kWidth = L::kWidth;
  static constexpr int64_t kAheadBytes = 64 << 10;

 public:
  Tile(const Call& call, const Task& task, void* scratch)
      : call_(call),
        task_(task),
        group_(call.group_heads()),
        rows_per_head_(task.tokens() * group_),
        rows_(rows_per_head_ * task.heads()),
        first_position_(call.batch.position(task.request, task.token_begin)),
        lay_(call, rows_, scratch),
        heads_ahead_(heads_ahead(call.layer)) {}

  void run() {
    Range range = kvell::readable(call_, task_);
    range.begin = max(range.begin, task_.section_begin * kSection);
    range.end = min(range.end, task_.section_end * kSection);
    if (!task_.record) begin_totals();
    K::pack_query(call_, task_, lay_);
    if constexpr (K::kPageRows > 0)
      if (rows_per_head_ <= K::kPageRows) K::widen_query(lay_, rows_per_head_);
    spans(range);
    if (!task_.record) end_totals();
  }

  void fold(const float* records, int32_t sections) {
    begin_totals();
    for (int32_t s = 0; s < sections; ++s)
      for (int32_t row = 0; row < rows_; ++row, records += lay_.record_floats)
        lay_.add_to_total(row, records[0], records[1], records + 16);
    end_totals();
  }

 private:
  void begin_totals() {
    lay_.clear_totals();
    if (call_.elsewhere.starts) lay_.add_elsewhere(task_, rows_per_head_);
  }

  void end_totals() {
    call_.partials.starts ? lay_.keep_partials(task_, rows_per_head_) : lay_.finish(task_, rows_per_head_);
  }

  // Heads whose rows of a span are fetched together: a page's are neighbours in memory, but
  // what is fetched must stay in the second-level cache until its turn.
  static int32_t heads_ahead(const kvell::Layer& layer) {
    const int64_t head = kSpan * layer.row_bytes() * (layer.latent_size > 0 ? 1 : 2);
    return head < kAheadBytes ? static_cast<int32_t>(kAheadBytes / head) : 1;
  }

  static int32_t min(int32_t a, int32_t b) { return a < b ? a : b; }
  static int32_t max(int32_t a, int32_t b) { return a > b ? a : b; }

  void spans(Range range) {
    const int32_t first = range.begin / kSpan * kSpan;
    find_rows(first, range, found_[0]);
    if constexpr (K::kBlockRows > 0) {  // elsewhere much of a burst would be dropped: see Stream
      stream(found_[0], 0);
      next_.fetch_all();
    }
    for (int32_t position = first; position < range.end; position += kSpan) {
      if (position == first || position % kSection == 0) lay_.clear_section();
      find_rows(position + kSpan, range, found_[1]);
      for (int32_t head = 0; head < task_.heads(); head += heads_ahead_) {
        const int32_t after = min(head + heads_ahead_, task_.heads());
        if (after < task_.heads())
          stream(found_[0], after);
        else
          stream(found_[1], 0);
        attend_heads(head, after, position);
      }
      found_[0] = found_[1];
      const int32_t after = position + kSpan;
      if (after % kSection == 0 || after >= range.end) task_.record ? keep_record() : lay_.add_sections();
    }
  }

  // Address of the task's first head's K row of each position of a span, null where
  // nothing is to be read.
  struct Found {
    const uint8_t* rows[kSpan];
    bool whole;  // none is null
    int32_t pages, begins[kSpan + 1];  // the first row of each page, and one behind the last
  };

  void find_rows(int32_t position, Range range, Found& found) {
    const int32_t page_tokens = call_.layer.page_tokens;
    const int64_t row_bytes = call_.layer.row_bytes();
    const int64_t at = task_.head_begin * call_.layer.head_bytes();
    const int32_t begin = max(range.begin - position, 0), end = min(range.end - position, kSpan);
    found.whole = begin == 0 && end == kSpan;
    if (!found.whole) {
      for (const uint8_t*& row : found.rows) row = nullptr;
      lay_.clear_zeros();
    }
    found.pages = 0;
    found.begins[0] = begin;
    for (int32_t i = begin; i < end; found.begins[++found.pages] = i) {
      const int32_t in_page = (position + i) % page_tokens;
      const uint8_t* row = page_of(position + i) + at + in_page * row_bytes;
      for (const int32_t stop = min(end, i + page_tokens - in_page); i < stop; row += row_bytes)
        found.rows[i++] = row;
    }
  }

  // A span's rows of one head, `at` bytes behind the first head's.
  void shift_rows(const Found& found, int64_t at, const uint8_t** rows) const {
    for (int i = 0; i < kSpan; ++i) rows[i] = found.rows[i] + at;
    if (found.whole) return;
    for (int i = 0; i < kSpan; ++i)
      if (!found.rows[i]) rows[i] = lay_.zeros;
  }

  const uint8_t* page_of(int32_t position) const {
    const kvell::Batch& batch = call_.batch;
    const int32_t entry =
        position / call_.layer.page_tokens - batch.first_positions[task_.request];
    return call_.layer.page(batch.page_ids[batch.table_starts[task_.request] + entry]);
  }

  // Lines up a span of the task's next heads from `first` on.
  void stream(const Found& found, int32_t first) {
    const int64_t row_bytes = call_.layer.row_bytes(), head_bytes = call_.layer.head_bytes();
    const int64_t values_at = call_.layer.value_offset_bytes();
    const int32_t end = min(first + heads_ahead_, task_.heads());
    next_.clear();
    for (int32_t page = 0; page < found.pages; ++page) {
      const int32_t begin = found.begins[page];
      const int64_t bytes = (found.begins[page + 1] - begin) * row_bytes;
      const uint8_t* keys = found.rows[begin];
      for (int32_t head = first; head < end; ++head) next_.add(keys + head * head_bytes, bytes);
      for (int32_t head = first; head < end && values_at > 0; ++head)
        next_.add(keys + values_at + head * head_bytes, bytes);
    }
  }

  // Some heads' rows × one span.
  void attend_heads(int32_t begin, int32_t end, int32_t position) {
    if constexpr (K::kBlockRows > 0) {
      const int32_t together = K::kBlockRows / rows_per_head_;
      if (together == 0)
        for (int32_t head = begin; head < end; ++head) attend_blocks(head, position);
      else
        for (int32_t head = begin; head < end; head += together)
          attend_together(head, min(together, end - head), position);
    } else {
      for (int32_t head = begin; head < end; ++head) attend_rows(head, position);
    }
  }

  // Several heads' rows, as many as make a block: what one head's arithmetic waits for leaves room for
  // another's.
  void attend_together(int32_t head, int32_t heads, int32_t position) {
    const int64_t at = head * call_.layer.head_bytes(), head_bytes = call_.layer.head_bytes();
    const int32_t rows = rows_per_head_;
    Block<K> block;
    typename K::Rows place;
    for (int32_t h = 0; h < heads; ++h) {
      K::place_keys(lay_, found_[0].rows, found_[0].whole, at + h * head_bytes, rows, place);
      K::block_scores(lay_, head + h, 0, rows, rows, place, &next_, block.scores + h * rows);
    }
    weigh_rows(block, head * rows, heads * rows, 0, position, &next_);
    for (int32_t h = 0; h < heads; ++h) {
      const int64_t values_at = at + h * head_bytes + call_.layer.value_offset_bytes();
      if (spoils_a_row(values_at, position)) {
        add_apart(values_at, position, 0, rows, [&](int32_t begin, int32_t count, const typename K::Rows& values) {
          K::add_block(lay_, head * rows, h * rows + begin, count, block.weights, block.factor, values, &next_);
        });
        continue;
      }
      K::place_values(lay_, found_[0].rows, found_[0].whole, values_at, rows, next_, place);
      K::add_block(lay_, head * rows, h * rows, rows, block.weights, block.factor, place, &next_);
    }
  }

  // One head's rows, block after block: the next one's scores and what the last one adds are under way
  // while this one's become weights. The first fetches what follows the span.
  void attend_blocks(int32_t head, int32_t position) {
    const int64_t at = head * call_.layer.head_bytes();
    const int32_t first = head * rows_per_head_;
    int32_t row = reading_block(0, position);
    if (row >= rows_per_head_) return;
    const int64_t values_at = at + call_.layer.value_offset_bytes();
    const bool apart = spoils_a_row(values_at, position);
    typename K::Rows keys, values;
    K::place_keys(lay_, found_[0].rows, found_[0].whole, at, rows_per_head_, keys);
    if (!apart)
      K::place_values(lay_, found_[0].rows, found_[0].whole, values_at, rows_per_head_, next_, values);
    Block<K> blocks[2];
    const auto add = [&](int32_t of, const Block<K>& block) {
      if (!apart) return K::add_pairs(lay_, first + of, 0, block_rows(of), block.weights, block.factor);
      add_apart(values_at, position, of, block_rows(of), [&](int32_t begin, int32_t count, const auto&) {
        K::add_pairs(lay_, first + of, begin, count, block.weights, block.factor);
      });
    };
    Stream* next = &next_;
    K::block_scores(lay_, head, row, block_rows(row), rows_per_head_, keys, next, blocks[0].scores);
    int32_t before = -1;
    int turn = 0;
    for (; row < rows_per_head_; turn ^= 1, next = nullptr) {
      const int32_t after = reading_block(row + K::kBlockRows, position);
      if (after < rows_per_head_)
        K::block_scores(lay_, head, after, block_rows(after), rows_per_head_, keys, nullptr,
                        blocks[turn ^ 1].scores);
      if (before >= 0) add(before, blocks[turn ^ 1]);
      weigh_rows(blocks[turn], first + row, block_rows(row), row, position, next);
      before = row;
      row = after;
    }
    add(before, blocks[turn ^ 1]);
  }

  // Of a block's rows from `row` of their head on: each token's apart, with values that it reads and
  // zeros. Calls add(first row in the block, rows, values).
  template <class Add>
  void add_apart(int64_t values_at, int32_t position, int32_t row, int32_t rows, Add add) {
    typename K::Rows values;
    for (int32_t begin = 0; begin < rows;) {
      const int32_t count = min(group_ - (row + begin) % group_, rows - begin);
      const uint8_t* read[kSpan];
      read_by(row + begin, position, read);
      K::place_values(lay_, read, false, values_at, rows_per_head_, next_, values);
      add(begin, count, values);
      begin += count;
    }
  }

  int32_t block_rows(int32_t row) const { return min(K::kBlockRows, rows_per_head_ - row); }

  // The first block from `row` on that reads any of a span.
  int32_t reading_block(int32_t row, int32_t position) const {
    while (row < rows_per_head_ && reads_nothing(row, block_rows(row), position)) row += K::kBlockRows;
    return row;
  }

  // A block's scores become weights: rows from `first` on, which in their heads begin at `row`.
  void weigh_rows(Block<K>& block, int32_t first, int32_t rows, int32_t row, int32_t position,
                  Stream* next) {
    const int32_t in_head = min(rows, rows_per_head_ - row);
    const bool whole = reads_all(row, in_head, position);
    Range counted[K::kBlockRows];
    for (int32_t r = 0; r < rows; ++r)
      counted[r] = whole ? Range{0, kSpan} : counted_in(position, row + r % in_head);
    K::weigh_block(block.scores, rows, rows_per_head_, counted, call_.rule, lay_.maximum + first, block.weights,
                   block.factor, next, call_.layer.head_size / in_head);
  }

  // One head's rows × one span. A few rows read the pages themselves; for more, K and V
  // are packed once and read from cache by every group of rows.
  void attend_rows(int32_t head, int32_t position) {
    const int64_t at = head * call_.layer.head_bytes();
    const uint8_t* rows[3 * kSpan];  // in the order in which pages are read: the last are the next head's
    const uint8_t **keys = rows, **values = rows + kSpan;
    shift_rows(found_[0], at, keys);
    shift_rows(found_[0], at + call_.layer.value_offset_bytes(), values);
    if (spoils_a_row(at + call_.layer.value_offset_bytes(), position))
      return attend_apart(head, position, keys);
    if constexpr (K::kPageRows > 0) {
      if (rows_per_head_ <= K::kPageRows) {
        const bool last = head + 1 == task_.heads();
        shift_rows(found_[last], last ? 0 : at + call_.layer.head_bytes(), rows + 2 * kSpan);
        return remainder<K::kPageRows, true>(head, 0, position, keys, values);
      }
    }
    K::pack_keys(lay_, keys, next_);
    K::pack_values(lay_, values, next_);
    attend_groups(head, position, keys, values);
  }

  // Row by row, each with the values that it reads and zeros.
  void attend_apart(int32_t head, int32_t position, SpanRows keys) {
    const int64_t at = head * call_.layer.head_bytes() + call_.layer.value_offset_bytes();
    const uint8_t* values[kSpan];
    K::pack_keys(lay_, keys, next_);
    lay_.clear_zeros();
    for (int32_t row = 0; row < rows_per_head_; ++row) {
      read_by(row, position, values);
      for (const uint8_t*& value : values) value = value ? value + at : lay_.zeros;
      K::pack_values(lay_, values, next_);
      row_group<1, false>(head, row, position, keys, values);
    }
  }

  void attend_groups(int32_t head, int32_t position, SpanRows keys, SpanRows values) {
    int32_t row = 0;
    for (; row + K::kRows <= rows_per_head_; row += K::kRows)
      row_group<K::kRows, false>(head, row, position, keys, values);
    remainder<K::kRows - 1, false>(head, row, position, keys, values);
  }

  template <int R, bool FromPages>
  void remainder(int32_t head, int32_t row, int32_t position, SpanRows keys, SpanRows values) {
    if constexpr (R > 0) {
      if (rows_per_head_ - row == R)
        row_group<R, FromPages>(head, row, position, keys, values);
      else
        remainder<R - 1, FromPages>(head, row, position, keys, values);
    }
  }

  // R query rows × one span: scores, weights, and their sum over V.
  template <int R, bool FromPages>
  void row_group(int32_t head, int32_t row_in_head, int32_t position, SpanRows keys,
                 SpanRows values) {
    if (reads_nothing(row_in_head, R, position)) return;
    const int32_t row = head * rows_per_head_ + row_in_head;
    alignas(64) float scores[R][kSpan];
    alignas(64) Item weights[R][kSpan / K::kPerItem];
    float factor[R];
    if constexpr (FromPages)
      K::template scores_from_pages<R>(lay_, row, keys, next_, scores);
    else
      this->template scores_of<R>(row, scores);
    Range counted[R];
    for (int r = 0; r < R; ++r) counted[r] = counted_in(position, row_in_head + r);
    K::template weigh_rows<R>(scores, counted, call_.rule, lay_.maximum + row, lay_.sums + row * kWidth,
                              weights, factor);
    const int32_t depth = min(kSpan, own_position(row_in_head + R - 1) + 1 - position);
    values_of<R, FromPages>(row, weights[0], factor, (depth + K::kPerItem - 1) / K::kPerItem,
                            values);
  }

  int32_t own_position(int32_t row_in_head) const { return first_position_ + row_in_head / group_; }

  bool reads_nothing(int32_t row_in_head, int32_t rows, int32_t position) const {
    return position > own_position(row_in_head + rows - 1) ||
           position + kSpan <= call_.rule.first_readable(own_position(row_in_head));
  }

  bool reads_all(int32_t row_in_head, int32_t rows, int32_t position) const {
    const Range table = pages_range();
    return position >= table.begin && position + kSpan <= table.end &&
           position + kSpan <= own_position(row_in_head) + 1 &&
           position >= call_.rule.first_readable(own_position(row_in_head + rows - 1));
  }

  // The found rows of a span's positions that a row reads, null elsewhere.
  void read_by(int32_t row_in_head, int32_t position, const uint8_t** rows) const {
    const Range counted = counted_in(position, row_in_head);
    for (int i = 0; i < kSpan; ++i)
      rows[i] = i >= counted.begin && i < counted.end ? found_[0].rows[i] : nullptr;
  }

  // Does a span hold values that are no numbers where some of the rows that read it do not?
  bool spoils_a_row(int64_t values_at, int32_t position) const {
    const int32_t last = first_position_ + task_.tokens() - 1;
    if (last == first_position_) return false;
    const int32_t all_from = call_.rule.first_readable(last) - position, all_until = first_position_ + 1 - position;
    for (int32_t i = found_[0].begins[0]; i < found_[0].begins[found_[0].pages]; ++i)
      if ((i < all_from || i >= all_until) && !is_numbers(call_.layer, found_[0].rows[i] + values_at)) return true;
    return false;
  }

  // Which of a span's positions a row reads.
  Range counted_in(int32_t position, int32_t row_in_head) const {
    const int32_t own = own_position(row_in_head);
    const Range table = pages_range();
    return {max(table.begin, call_.rule.first_readable(own)) - position,
            min(table.end, own + 1) - position};
  }

  Range pages_range() const {
    const int32_t page_tokens = call_.layer.page_tokens;
    return {call_.batch.table_begin(task_.request, page_tokens),
            call_.batch.table_end(task_.request, page_tokens)};
  }

  // A score is the sum of K::kChains sums, each over every K::kChains-th item, in this order.
  template <int R>
  void scores_of(int32_t row, float (*scores)[kSpan]) const {
    constexpr int C = K::kChains > 1 ? K::kColumns / 2 : K::kColumns;
    for (int32_t column = 0; column < kSpan; column += C * kWidth) {
      Vec total[R][C];
      for (int chain = 0; chain < K::kChains; ++chain) {
        Vec acc[R][C];
        for (int r = 0; r < R; ++r)
          for (int c = 0; c < C; ++c) acc[r][c] = L::zero();
        multiply<K, R, C, K::kChains>(acc, lay_.query + row * lay_.query_items + chain,
                                      lay_.query_items, lay_.keys + chain * kSpan + column, kSpan,
                                      lay_.query_items - chain);
        for (int r = 0; r < R; ++r)
          for (int c = 0; c < C; ++c)
            total[r][c] = chain == 0 ? acc[r][c] : L::add(total[r][c], acc[r][c]);
      }
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) L::store(scores[r] + column + c * kWidth, total[r][c]);
    }
  }

  template <int R, bool FromPages>
  void values_of(int32_t row, const Item* weights, const float* factor, int32_t depth,
                 SpanRows values) {
    constexpr int C = FromPages && R > 6 ? K::kColumns / 2 : K::kColumns;  // as registers allow
    int32_t column = 0;
    for (; column + C * kWidth <= lay_.padded_size; column += C * kWidth)
      values_columns<R, C, FromPages>(row, column, weights, factor, depth, values);
    for (; column < lay_.padded_size; column += kWidth)
      values_columns<R, 1, FromPages>(row, column, weights, factor, depth, values);
  }

  template <int R, int C, bool FromPages>
  void values_columns(int32_t row, int32_t column, const Item* weights, const float* factor,
                      int32_t depth, SpanRows values) {
    float* out = lay_.output + row * lay_.padded_size + column;
    Vec acc[R][C];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c)
        acc[r][c] = L::madd(L::load(out + r * lay_.padded_size + c * kWidth), L::set(factor[r]),
                            L::zero());
    if constexpr (FromPages)
      K::add_from_pages(acc, weights, lay_, values, column, depth, next_);
    else
      multiply<K, R, C>(acc, weights, kSpan / K::kPerItem, lay_.values + column, lay_.padded_size,
                        depth);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) L::store(out + r * lay_.padded_size + c * kWidth, acc[r][c]);
  }

  void keep_record() const {
    float* record = task_.record;
    for (int32_t row = 0; row < rows_; ++row, record += lay_.record_floats) {
      record[0] = lay_.maximum[row];
      record[1] = L::sum(L::load(lay_.sums + row * kWidth));
      for (int32_t d = 0; d < lay_.padded_size; d += kWidth)
        L::store(record + 16 + d, L::load(lay_.output + row * lay_.padded_size + d));
    }
  }

  const Call& call_;
  const Task& task_;
  const int32_t group_, rows_per_head_, rows_, first_position_;
  Lay<K> lay_;
  const int32_t heads_ahead_;
  Found found_[2];  // this span's, and the next one's
  Stream next_;
};

template <class K>
void run_tile(const Call& call, const Task& task, void* scratch) {
  Tile<K>(call, task, scratch).run();
}

template <class K>
void fold_tile(const Call& call, const Fold& fold, void* scratch) {
  Tile<K>(call, fold.rows, scratch).fold(fold.records, fold.sections);
}

}  // namespace
