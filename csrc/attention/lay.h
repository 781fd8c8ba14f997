// How a task's scratch is laid out, and the states of its rows.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cpu/bfloat16.h"
#include "softmax.h"
#include "task.h"

namespace {

// Rows of a span for one head; what is not to be read is a row of zeros.
using SpanRows = const uint8_t* const*;

// What a kernel needs of a task's scratch, in items, that multiplies rows as they lie, one after the other.
template <class Lanes, int PerItem>
struct PlainRooms {
  static constexpr int kBlockRows = 0, kSizes = Lanes::kWidth;

  static int64_t key_room(int64_t row_items) { return kvell::kSpan * row_items; }
  static int64_t value_room(int64_t padded_size) { return kvell::kSpan / PerItem * padded_size; }
  static int64_t query_room(int64_t rows, int64_t, int64_t row_items) { return rows * row_items; }
  static void put_in_order(float*, int32_t) {}
  static void put_apart(float*, int32_t) {}  // its opposite
};

template <class K>
struct Lay {
  using L = typename K::Lanes;
  using Item = typename K::Item;
  static constexpr int kWidth = L::kWidth;

  Lay(const kvell::Call& call, int32_t rows_of_task, void* scratch)
      : call(call),
        rows(rows_of_task),
        head_size(call.layer.head_size),
        value_size(call.layer.value_size()),
        padded_size((value_size + K::kSizes - 1) / K::kSizes * K::kSizes),
        query_items(head_size / K::kPerItem),
        record_floats(kvell::record_floats(value_size)) {
    uint8_t* at = static_cast<uint8_t*>(scratch);
    take(at, keys, K::key_room(query_items));
    take(at, values, K::value_room(padded_size));
    take(at, query, K::query_room(rows, call.layer.kv_heads, query_items));
    take(at, wide_query, K::kPageRows > 0 ? page_rows(call) * query_items * 4 : 0);
    take(at, output, int64_t(rows) * padded_size);
    take(at, sums, int64_t(rows) * kWidth);
    take(at, maximum, rows);
    take(at, total_output, int64_t(rows) * padded_size);
    take(at, total_sum, rows);
    take(at, total_maximum, rows);
    take(at, zeros, int64_t(head_size) * 4 + 4);
    used_bytes = at - static_cast<uint8_t*>(scratch);
  }

  static size_t bytes(const kvell::Call& call, int32_t rows) {
    return Lay(call, rows, nullptr).used_bytes;
  }

  void clear_section() { clear(output, maximum, sums, int64_t(rows) * kWidth); }
  void clear_zeros() { __builtin_memset(zeros, 0, size_t(head_size) * 4 + 4); }
  void clear_totals() { clear(total_output, total_maximum, total_sum, rows); }

  // Folds one section's state of a row into its total; sections must come in order.
  void add_to_total(int32_t row, float section_maximum, float section_sum, const float* section) {
    if (read_nothing(section_maximum, section_sum)) return;
    const float before = total_maximum[row];
    const float after = section_maximum > before ? section_maximum : before;
    total_maximum[row] = after;
    add_scaled(row, exp_of_one<L>(before - after), exp_of_one<L>(section_maximum - after), section_sum,
               section);
  }

  // The same of the section at hand, all rows of it: the same arithmetic, as many as lanes at a time.
  void add_sections() {
    for (int32_t first = 0; first < rows; first += kWidth) {
      alignas(64) float keeps[kWidth], adds[kWidth];
      const auto before = L::load(total_maximum + first), here = L::load(maximum + first);
      const auto after = L::where_less(before, here, here, before);
      L::store(keeps, exp_of<L>(minus(before, after)));
      L::store(adds, exp_of<L>(minus(here, after)));
      L::store(total_maximum + first, after);
      for (int32_t row = first; row < rows && row < first + kWidth; ++row) {
        const float sum = L::sum(L::load(sums + row * kWidth));
        if (!read_nothing(maximum[row], sum))
          add_scaled(row, keeps[row - first], adds[row - first], sum, output + row * padded_size);
      }
    }
  }

  // The totals begin with the sections that are elsewhere, in order. Their numbers are in the order
  // of a result, so the totals are too until all of them are in.
  void add_elsewhere(const kvell::Task& task, int32_t rows_per_head) {
    const int32_t records = call.elsewhere.count(task.request, call.batch);
    for (int32_t row = 0; records > 0 && row < rows; ++row) {
      float* section = output + row * padded_size;
      __builtin_memset(section, 0, sizeof(float) * padded_size);
      for (int32_t i = 0; i < records; ++i) {
        const float* record = record_at(call.elsewhere, task, i, place_of(task, row, rows_per_head));
        __builtin_memcpy(section, record + 2, sizeof(float) * value_size);
        add_to_total(row, record[0], record[1], section);
      }
      K::put_apart(total_output + row * padded_size, padded_size);
    }
  }

  // Leaves the rows' totals as a record for another instance.
  void keep_partials(const kvell::Task& task, int32_t rows_per_head) {
    const int32_t first = call.batch.table_begin(task.request, call.layer.page_tokens) / kvell::kSection;
    for (int32_t row = 0; row < rows; ++row) {
      const Place place = place_of(task, row, rows_per_head);
      float* record = record_at(call.partials, task, task.section_begin - first, place);
      K::put_in_order(total_output + row * padded_size, padded_size);
      record[0] = total_maximum[row];
      record[1] = total_sum[row];
      __builtin_memcpy(record + 2, total_output + row * padded_size, sizeof(float) * value_size);
    }
  }

  // Writes the rows' results: divided by the denominator, sinks added when not partial.
  void finish(const kvell::Task& task, int32_t rows_per_head) {
    for (int32_t row = 0; row < rows; ++row) {
      const auto [token, head] = place_of(task, row, rows_per_head);
      const int64_t at = int64_t(token) * call.query.heads + head;
      float scale = 0.0f;
      if (total_sum[row] > 0.0f || total_sum[row] != total_sum[row]) scale = result_scale(row, head);
      K::put_in_order(total_output + row * padded_size, padded_size);
      write_row(at, row, scale);
      if (!call.result.maximum) continue;
      call.result.maximum[at] = total_maximum[row];
      call.result.denominator[at] = total_sum[row];
    }
  }

  const kvell::Call& call;
  const int32_t rows, head_size, value_size, padded_size, query_items;
  const int64_t record_floats;
  Item *keys, *values, *query;
  Item* wide_query;  // as rows that read pages multiply it
  float *output, *sums, *maximum, *total_output, *total_sum, *total_maximum;
  uint8_t* zeros;  // stands for rows that nobody may read
  size_t used_bytes;

 private:
  // A row's token, counted over the batch, and its query head.
  struct Place {
    int32_t token, head;
  };

  Place place_of(const kvell::Task& task, int32_t row, int32_t rows_per_head) const {
    const int32_t group = call.group_heads(), in_head = row % rows_per_head;
    return {task.token_begin + in_head / group,
            (task.head_begin + row / rows_per_head) * group + in_head % group};
  }

  float* record_at(const kvell::Records& records, const kvell::Task& task, int32_t index, Place place) const {
    const int32_t begin = call.batch.query_starts[task.request];
    const int64_t token = records.starts[task.request] +
                          int64_t(index) * call.batch.new_tokens(task.request) + place.token - begin;
    return records.values + (token * call.query.heads + place.head) * (2 + value_size);
  }

  // A row of which no score is a number has no largest one either, but sums that are NaN.
  static bool read_nothing(float largest, float sum) {
    return largest == -__builtin_inff() && sum == sum;
  }

  static typename L::Vec minus(typename L::Vec a, typename L::Vec b) {
    return L::madd(b, L::set(-1.0f), a);
  }

  void add_scaled(int32_t row, float keep, float add, float section_sum, const float* section) {
    total_sum[row] = total_sum[row] * keep + section_sum * add;
    float* total = total_output + row * padded_size;
    for (int32_t d = 0; d < padded_size; d += kWidth) {
      const auto kept = L::madd(L::load(total + d), L::set(keep), L::zero());
      L::store(total + d, L::madd(L::load(section + d), L::set(add), kept));
    }
  }

  // As many rows as a task has at most that reads pages.
  int64_t page_rows(const kvell::Call& call) const {
    const int64_t most = int64_t(K::kPageRows) * call.layer.kv_heads;
    return rows < most ? rows : most;
  }

  template <class T>
  static void take(uint8_t*& at, T*& pointer, int64_t count) {
    pointer = reinterpret_cast<T*>(at);
    at += (count * sizeof(T) + 63) / 64 * 64;
  }

  void clear(float* out, float* largest, float* sum, int64_t sum_floats) {
    __builtin_memset(out, 0, sizeof(float) * rows * padded_size);
    __builtin_memset(sum, 0, sizeof(float) * sum_floats);
    for (int32_t row = 0; row < rows; ++row) largest[row] = -__builtin_inff();
  }

  // What the unnormalised output is multiplied by.
  float result_scale(int32_t row, int32_t head) const {
    if (call.result.maximum || !call.rule.sinks) return 1.0f / total_sum[row];
    const float sink = call.rule.sinks[head], before = total_maximum[row];
    const float after = sink > before ? sink : before;
    const float keep = exp_of_one<L>(before - after);
    return keep / (total_sum[row] * keep + exp_of_one<L>(sink - after));
  }

  void write_row(int64_t at, int32_t row, float scale) const {
    const float* from = total_output + row * padded_size;
    if (call.result.element == kvell::Element::float32) {
      float* to = static_cast<float*>(call.result.output) + at * value_size;
      for (int32_t d = 0; d < value_size; ++d) to[d] = from[d] * scale;
    } else {
      uint16_t* to = static_cast<uint16_t*>(call.result.output) + at * value_size;
      for (int32_t d = 0; d < value_size; ++d) to[d] = bf16_of(from[d] * scale);
    }
  }
};

}  // namespace
