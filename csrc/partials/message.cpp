#include "message.h"

#include <cmath>
#include <cstring>

#include "attention/arguments.h"
#include "attention/task.h"

namespace kvell {
namespace {

constexpr int64_t kMostSections = INT32_MAX / kSection / 2;  // positions, and rows behind them, fit in 32 bits
constexpr int64_t kMostRows = 1 << 24;
constexpr int32_t kMostHeads = 1 << 16;

}  // namespace

QueryHead read_head(const uint8_t* at, int64_t bytes) {
  QueryHead head{};
  if (bytes < int64_t(sizeof(QueryHead))) refuse("query: shorter than its head");
  std::memcpy(&head, at, sizeof(QueryHead));
  return head;
}

RowShape shape_of(const QueryHead& head, const Layer& pages) {
  if (head.heads < 1 || head.heads > kMostHeads || head.heads % pages.kv_heads)
    refuse("query: its heads are no multiple of those of the pages");
  if (head.element != Element::float32 && head.element != Element::bfloat16)
    refuse("query: rows of no known element");
  if (!std::isfinite(head.scale) || !std::isfinite(head.softcap) || head.softcap < 0)
    refuse("query: no such rule");
  return {head.heads, pages.head_size, pages.value_size(), head.element};
}

QueryMessage read_query(const QueryHead& head, const RowShape& shape, const uint8_t* at, int64_t bytes) {
  QueryMessage query{};
  query.head = head;
  if (head.runs < 0 || head.sections < 0 || head.rows < 0 || head.rows > kMostRows)
    refuse("query: a negative or too large number");
  if (query_bytes(shape, head.runs, head.sections, head.rows) != bytes)
    refuse("query: its length is not that of its rows");
  query.runs.resize(head.runs);
  query.rights.resize(head.sections);
  at += sizeof(QueryHead);
  std::memcpy(query.runs.data(), at, query.runs.size() * sizeof(QueryRun));
  std::memcpy(query.rights.data(), at + query.runs.size() * sizeof(QueryRun), query.rights.size() * 8);
  int64_t sections = 0, rows = 0;
  for (const QueryRun& run : query.runs) {
    if (run.rows < 1 || run.sections < 1 || run.first_section < 0) refuse("query: an empty run");
    if (int64_t(run.first_section) + run.sections > kMostSections) refuse("query: too far a section");
    sections += run.sections;
    rows += run.rows;
    query.record_rows += run.records() * run.rows;
  }
  if (sections != head.sections || rows != head.rows) refuse("query: runs of other sums");
  query.rows = at - sizeof(QueryHead) + rows_at(head.runs, head.sections);
  return query;
}

}  // namespace kvell
