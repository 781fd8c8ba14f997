#include "service.h"

#include <cstring>

#include "attention/arguments.h"

namespace kvell {
namespace {

int64_t wrong_answer(uint64_t number, uint8_t* to, int64_t room_bytes) {
  const AnswerHead head{number, int32_t(Answered::wrong), 0};
  if (room_bytes < int64_t(sizeof(head))) return 0;
  std::memcpy(to, &head, sizeof(head));
  return sizeof(head);
}

}  // namespace

Service::Service(const Backend& backend, std::vector<ServedLayer> layers, Loans& loans)
    : backend_(backend), layers_(std::move(layers)), loans_(loans) {
  for (const ServedLayer& layer : layers_) {
    if (layer.group < 0) continue;
    if (layer.pages.page_tokens < 1 || kSection % layer.pages.page_tokens)
      refuse("layers: pages do not divide a section");
  }
}

void Service::check_pages(const std::vector<std::vector<int32_t>>& pages) const {
  for (const ServedLayer& layer : layers_) {
    if (layer.group < 0) continue;
    if (layer.group >= int64_t(pages.size())) refuse("pages: a group is missing");
    const std::vector<int32_t>& ids = pages[layer.group];
    if (int64_t(ids.size()) * layer.pages.page_tokens != kSection) refuse("pages: not those of one section");
    check_below("pages", ids.data(), int64_t(ids.size()), layer.pages.num_pages());
  }
}

int64_t Service::Read::answer_bytes() const {
  return kvell::answer_bytes(shape, query.head.runs, query.record_rows);
}

Service::Read Service::read(const uint8_t* query, int64_t bytes) const {
  const QueryHead head = read_head(query, bytes);
  if (head.layer < 0 || head.layer >= int64_t(layers_.size())) refuse("query: no such layer");
  const ServedLayer& layer = layers_[head.layer];
  if (layer.group < 0) refuse("query: nothing is lent of this layer");
  const RowShape shape = shape_of(head, layer.pages);
  return {layer, shape, read_query(head, shape, query, bytes)};
}

int64_t Service::answer_bytes(const uint8_t* query, int64_t bytes) const {
  return read(query, bytes).answer_bytes();
}

int64_t Service::answer(int debtor, const uint8_t* query, int64_t bytes, uint8_t* to, int64_t room_bytes) {
  uint64_t number = 0;
  if (bytes >= int64_t(sizeof(number))) std::memcpy(&number, query, sizeof(number));
  try {
    const Read checked = read(query, bytes);
    const int64_t need = checked.answer_bytes();
    if (need > room_bytes) refuse("query: no room for its answer");
    compute(checked, debtor, to);
    return need;
  } catch (const std::exception&) {  // wrong numbers, or more of them than there is memory for
    ++wrong_;
    return wrong_answer(number, to, room_bytes);
  }
}

void Service::compute(const Read& read, int debtor, uint8_t* to) {
  const auto& [layer, shape, query] = read;
  const int64_t runs = query.head.runs, row_floats = shape.record_floats();
  const AnswerHead head{query.head.number, int32_t(Answered::fine), int32_t(runs)};
  std::memcpy(to, &head, sizeof(head));
  auto* const states = reinterpret_cast<int32_t*>(to + sizeof(head));
  auto* records = reinterpret_cast<float*>(to + records_at(runs));
  const uint8_t* rows = query.rows;
  const uint64_t* rights = query.rights.data();
  for (int64_t i = 0; i < runs; ++i) {
    const QueryRun& run = query.runs[i];
    std::vector<int32_t> pages;
    const bool reads = loans_.begin(rights, run.sections, debtor, layer.group, pages);
    if (reads) {
      const int32_t query_starts[] = {0, run.rows}, table_starts[] = {0, int32_t(pages.size())};
      const int32_t context = (run.first_section + run.sections) * kSection + run.rows;
      const int32_t first = run.first_section * (kSection / layer.pages.page_tokens);
      const int32_t record_starts[] = {0, int32_t(run.records() * run.rows)};
      Call call{layer.pages,
                {query_starts, &context, table_starts, pages.data(), &first, 1},
                {rows, shape.element, int64_t(shape.heads) * shape.head_size, shape.head_size, shape.heads},
                {query.head.scale, query.head.softcap, 0, 0, nullptr},
                {records, Element::float32, nullptr, nullptr},
                {},
                {records, record_starts}};
      attend(backend_, call, 1);
    }
    const bool stood = reads && loans_.finish(rights, run.sections);
    states[i] = int32_t(stood ? RunState::came : RunState::gone);
    // What others' pages gave must not leave.
    if (!stood) std::memset(records, 0, size_t(run.records() * run.rows * row_floats) * 4);
    rows += run.rows * shape.query_bytes();
    records += run.records() * run.rows * row_floats;
    rights += run.sections;
  }
}

}  // namespace kvell
