// Queries that travel to a creditor, and the records that come back: Infinite-LLM §4, equation 2.
//
//   query:   QueryHead │ QueryRun × runs │ uint64 right × sections │ … │ rows [heads, head_size]
//   answer:  AnswerHead │ int32 state × runs │ … │ records of each run [records, rows, heads, 2 + value_size]
//
// Numbers are little-endian; rows are of the query's element, records float32; both begin at a
// multiple of 64 bytes. Rights and rows are in the order of runs.
#pragma once
#include <cstdint>
#include <vector>

#include "attention/views.h"

namespace kvell {

// Sizes of a query's rows, and of records of them.
struct RowShape {
  int32_t heads, head_size, value_size;
  Element element;

  int64_t query_bytes() const { return int64_t(heads) * head_size * element_bytes(element); }
  int64_t record_floats() const { return int64_t(heads) * (2 + value_size); }
  bool operator==(const RowShape& other) const {
    return heads == other.heads && head_size == other.head_size && value_size == other.value_size &&
           element == other.element;
  }
};

// The debtor says how its layer attends, so that a creditor needs to know no more of it than its pages.
struct QueryHead {
  uint64_t number;  // which its answer repeats; its highest byte is the number of the model
  int32_t layer, runs, sections, rows;
  int32_t heads;
  Element element;
  float scale, softcap;  // of scores, as in Rule
};

// Rows of one request for consecutive sections of its context, each by a right to read it.
struct QueryRun {
  int32_t first_section, sections, rows, unused;

  // A part from position 0 on is folded, since nothing comes before it.
  int64_t records() const { return first_section == 0 ? 1 : sections; }
};

enum class Answered : int32_t { fine = 0, wrong = 1 };  // wrong: the query could not be read
enum class RunState : int32_t { came = 0, gone = 1 };   // gone: a right is not its sender's any more

struct AnswerHead {
  uint64_t number;
  int32_t answered, runs;
};

inline int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

inline int64_t rows_at(int64_t runs, int64_t sections) {
  return whole_lines(int64_t(sizeof(QueryHead)) + runs * int64_t(sizeof(QueryRun)) + sections * 8);
}

inline int64_t query_bytes(const RowShape& shape, int64_t runs, int64_t sections, int64_t rows) {
  return rows_at(runs, sections) + rows * shape.query_bytes();
}

inline int64_t records_at(int64_t runs) {
  return whole_lines(int64_t(sizeof(AnswerHead)) + runs * 4);
}

// `record_rows`: rows of all records of all runs.
inline int64_t answer_bytes(const RowShape& shape, int64_t runs, int64_t record_rows) {
  return records_at(runs) + record_rows * shape.record_floats() * 4;
}

// A query that was checked: nothing in it reaches beyond its bytes.
struct QueryMessage {
  QueryHead head;
  std::vector<QueryRun> runs;
  std::vector<uint64_t> rights;
  const uint8_t* rows;
  int64_t record_rows;
};

// Reads the head of a query, for a creditor to find the layer. Throws std::invalid_argument.
QueryHead read_head(const uint8_t* at, int64_t bytes);

// The shape of a query's rows over a layer's pages. Throws std::invalid_argument.
RowShape shape_of(const QueryHead& head, const Layer& pages);

// Reads a query of `bytes`, of which any may be wrong, or change while they are read.
// Throws std::invalid_argument.
QueryMessage read_query(const QueryHead& head, const RowShape& shape, const uint8_t* at, int64_t bytes);

}  // namespace kvell
