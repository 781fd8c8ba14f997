// Attention of one task over its pages, for any kernel K.
//
// K says how a pool's elements become *items* (32 bits: one float, or two bf16 that one
// instruction multiplies and adds), and gives lanes, register tile and packing:
//   K::Lanes, K::Item, K::kPerItem, K::kRows × K::kColumns registers of accumulators
//   K::multiply_add(acc, item, items), K::pack_keys, K::pack_values, K::pack_query,
//   K::pack_weights (weights → items, adds what it packed to the row's lane sums)
#pragma once
#include <cstdint>

#include "lay.h"
#include "softmax.h"

namespace {

using kvell::Call;
using kvell::Fold;
using kvell::kSection;
using kvell::kSpan;
using kvell::Range;
using kvell::Task;

// acc[r][c] += Σ_k a[r][k] · b[k][c], in the order of k, whatever R and C are.
template <class K, int R, int C>
static inline __attribute__((always_inline)) void multiply(
    typename K::Lanes::Vec (&acc)[R][C], const typename K::Item* a, int64_t a_stride,
    const typename K::Item* b, int64_t b_stride, int32_t depth) {
  for (int32_t k = 0; k < depth; ++k) {
    typename K::Items column[C];
    for (int c = 0; c < C; ++c) column[c] = K::load(b + k * b_stride + c * K::Lanes::kWidth);
    for (int r = 0; r < R; ++r) {
      const auto item = K::broadcast(a + r * a_stride + k);
      for (int c = 0; c < C; ++c) acc[r][c] = K::multiply_add(acc[r][c], item, column[c]);
    }
  }
}

template <class K>
class Tile {
  using L = typename K::Lanes;
  using Vec = typename L::Vec;
  using Item = typename K::Item;
  static constexpr int kWidth = L::kWidth;

 public:
  Tile(const Call& call, const Task& task, void* scratch)
      : call_(call),
        task_(task),
        group_(call.group_heads()),
        rows_per_head_(task.tokens() * group_),
        rows_(rows_per_head_ * task.heads()),
        first_position_(call.batch.position(task.request, task.token_begin)),
        lay_(call, rows_, scratch) {}

  void run() {
    const Range range = kvell::readable(call_, task_);
    if (!task_.record) lay_.clear_totals();
    K::pack_query(call_, task_, lay_);
    for (int32_t s = task_.section_begin; s < task_.section_end; ++s) {
      lay_.clear_section();
      section(max(range.begin, s * kSection), min(range.end, (s + 1) * kSection));
      if (task_.record)
        keep_record();
      else
        fold_section();
    }
    if (!task_.record) lay_.finish(task_, rows_per_head_);
  }

  void fold(const float* records, int32_t sections) {
    lay_.clear_totals();
    for (int32_t s = 0; s < sections; ++s)
      for (int32_t row = 0; row < rows_; ++row, records += lay_.record_floats)
        lay_.add_to_total(row, records[0], records[1], records + 16);
    lay_.finish(task_, rows_per_head_);
  }

 private:
  static int32_t min(int32_t a, int32_t b) { return a < b ? a : b; }
  static int32_t max(int32_t a, int32_t b) { return a > b ? a : b; }

  void section(int32_t begin, int32_t end) {
    if (begin >= end) return;
    const uint8_t* rows[2][kSpan];
    int32_t position = begin / kSpan * kSpan;
    find_rows(position, begin, end, rows[0]);
    for (int side = 0; position < end; position += kSpan, side ^= 1) {
      find_rows(position + kSpan, begin, end, rows[side ^ 1]);
      for (int32_t head = 0; head < task_.heads(); ++head) {
        const bool last = head + 1 == task_.heads();
        pack(head, rows[side], last ? rows[side ^ 1] : rows[side], last ? 0 : head + 1);
        row_groups(head, position);
      }
    }
  }

  // Address of head 0's K row of each position of a span, null where nothing is to be read.
  void find_rows(int32_t position, int32_t begin, int32_t end, const uint8_t** rows) const {
    const kvell::Layer& layer = call_.layer;
    const int32_t* table = call_.batch.page_ids + call_.batch.table_starts[task_.request];
    const int32_t first_page = call_.batch.first_positions[task_.request];
    int32_t page = -1, page_end = 0;
    const uint8_t* row = nullptr;
    for (int32_t i = 0; i < kSpan; ++i, ++position, row += layer.row_bytes()) {
      if (position < begin || position >= end) {
        rows[i] = nullptr;
        continue;
      }
      if (page < 0 || position >= page_end) {
        page = position / layer.page_tokens;
        page_end = (page + 1) * layer.page_tokens;
        row = layer.page(table[page - first_page]) +
              (position - page * layer.page_tokens) * layer.row_bytes();
      }
      rows[i] = row;
    }
  }

  // Packs a head's K and V of a span while asking memory for the next head's or span's.
  void pack(int32_t head, const uint8_t* const* rows, const uint8_t* const* next_rows,
            int32_t next_head) const {
    const kvell::Layer& layer = call_.layer;
    const int64_t at = (task_.head_begin + head) * layer.head_bytes();
    const int64_t next = (task_.head_begin + next_head) * layer.head_bytes();
    const int64_t values = layer.value_offset_bytes();
    K::pack_keys(lay_, {rows, at}, {next_rows, next});
    K::pack_values(lay_, {rows, at + values}, {next_rows, next + values});
  }

  void row_groups(int32_t head, int32_t position) {
    int32_t row = 0;
    for (; row + K::kRows <= rows_per_head_; row += K::kRows)
      row_group<K::kRows>(head, row, position);
    remainder<K::kRows - 1>(head, row, position);
  }

  template <int R>
  void remainder(int32_t head, int32_t row, int32_t position) {
    if constexpr (R > 0) {
      if (rows_per_head_ - row == R)
        row_group<R>(head, row, position);
      else
        remainder<R - 1>(head, row, position);
    }
  }

  // R query rows × one span: scores, weights, and their sum over V.
  template <int R>
  void row_group(int32_t head, int32_t row_in_head, int32_t position) {
    const int32_t window = call_.rule.window_tokens;
    const int32_t first = first_position_ + row_in_head / group_;
    const int32_t last = first_position_ + (row_in_head + R - 1) / group_;
    if (position > last || (window > 0 && position + kSpan <= first - window + 1)) return;
    const int32_t row = head * rows_per_head_ + row_in_head;
    const Range table = pages_range();
    alignas(64) float scores[R][kSpan];
    alignas(64) Item weights[R][kSpan / K::kPerItem];
    float factor[R];
    this->template scores_of<R>(row, scores);
    for (int r = 0; r < R; ++r) {
      const int32_t own = first_position_ + (row_in_head + r) / group_;
      const int32_t begin = max(table.begin, window > 0 ? own - window + 1 : 0) - position;
      const int32_t end = min(table.end, own + 1) - position;
      factor[r] = weigh<L>(scores[r], begin, end, call_.rule, lay_.maximum[row + r]);
      K::pack_weights(scores[r], weights[r], factor[r], lay_.sums + (row + r) * kWidth);
    }
    const int32_t depth = min(kSpan, last + 1 - position);
    values_of<R>(row, weights[0], factor, (depth + K::kPerItem - 1) / K::kPerItem);
  }

  Range pages_range() const {
    const int32_t page_tokens = call_.layer.page_tokens;
    return {call_.batch.table_begin(task_.request, page_tokens),
            call_.batch.table_end(task_.request, page_tokens)};
  }

  template <int R>
  void scores_of(int32_t row, float (*scores)[kSpan]) const {
    constexpr int C = K::kColumns;
    for (int32_t column = 0; column < kSpan; column += C * kWidth) {
      Vec acc[R][C];
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) acc[r][c] = L::zero();
      multiply<K, R, C>(acc, lay_.query + row * lay_.query_items, lay_.query_items,
                        lay_.keys + column, kSpan, lay_.query_items);
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) L::store(scores[r] + column + c * kWidth, acc[r][c]);
    }
  }

  template <int R>
  void values_of(int32_t row, const Item* weights, const float* factor, int32_t depth) {
    constexpr int C = K::kColumns;
    int32_t column = 0;
    for (; column + C * kWidth <= lay_.padded_size; column += C * kWidth)
      values_columns<R, C>(row, column, weights, factor, depth);
    for (; column < lay_.padded_size; column += kWidth)
      values_columns<R, 1>(row, column, weights, factor, depth);
  }

  template <int R, int C>
  void values_columns(int32_t row, int32_t column, const Item* weights, const float* factor,
                      int32_t depth) {
    float* out = lay_.output + row * lay_.padded_size + column;
    Vec acc[R][C];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c)
        acc[r][c] = L::madd(L::load(out + r * lay_.padded_size + c * kWidth), L::set(factor[r]),
                            L::zero());
    multiply<K, R, C>(acc, weights, kSpan / K::kPerItem, lay_.values + column, lay_.padded_size,
                      depth);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) L::store(out + r * lay_.padded_size + c * kWidth, acc[r][c]);
  }

  void fold_section() {
    for (int32_t row = 0; row < rows_; ++row)
      lay_.add_to_total(row, lay_.maximum[row], L::sum(L::load(lay_.sums + row * kWidth)),
                        lay_.output + row * lay_.padded_size);
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
