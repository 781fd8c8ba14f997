#include "service.h"

#include <cstring>

#include "attention/arguments.h"

namespace kvell {
namespace {

RowShape shape_of(Element element, int32_t heads, const std::vector<ServedLayer>& layers) {
  if (layers.empty() || heads < 1) refuse("layers: there are none");
  const Layer& pages = layers.front().pages;
  if (pages.kv_heads < 1 || heads % pages.kv_heads) refuse("heads: no multiple of those of the pages");
  return {heads, pages.head_size, pages.value_size(), int32_t(element_bytes(element))};
}

int64_t wrong_answer(uint64_t number, uint8_t* to, int64_t room_bytes) {
  const AnswerHead head{number, int32_t(Answered::wrong), 0};
  if (room_bytes < int64_t(sizeof(head))) return 0;
  std::memcpy(to, &head, sizeof(head));
  return sizeof(head);
}

}  // namespace

Service::Service(const Backend& backend, Element element, int32_t heads, std::vector<ServedLayer> layers,
                 Loans& loans)
    : backend_(backend),
      element_(element),
      shape_(shape_of(element, heads, layers)),
      layers_(std::move(layers)),
      loans_(loans) {
  for (const ServedLayer& layer : layers_) {
    if (layer.group < 0) continue;
    if (layer.rule.window_tokens || layer.rule.chunk_tokens) refuse("layers: only full attention is lent");
    if (layer.pages.kv_heads != layers_.front().pages.kv_heads || layer.pages.head_size != shape_.head_size ||
        layer.pages.value_size() != shape_.value_size)
      refuse("layers: pages of another shape");
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

int64_t Service::answer_bytes(const uint8_t* query, int64_t bytes) const {
  const QueryMessage read = read_query(shape_, int64_t(layers_.size()), query, bytes);
  return kvell::answer_bytes(shape_, read.head.runs, read.record_rows);
}

int64_t Service::answer(int debtor, const uint8_t* query, int64_t bytes, uint8_t* to, int64_t room_bytes) {
  uint64_t number = 0;
  if (bytes >= int64_t(sizeof(number))) std::memcpy(&number, query, sizeof(number));
  try {
    const QueryMessage read = read_query(shape_, int64_t(layers_.size()), query, bytes);
    const int64_t need = kvell::answer_bytes(shape_, read.head.runs, read.record_rows);
    if (layers_[read.head.layer].group < 0) refuse("query: nothing is lent of this layer");
    if (need > room_bytes) refuse("query: no room for its answer");
    compute(read, debtor, to);
    return need;
  } catch (const std::exception&) {  // wrong numbers, or more of them than there is memory for
    ++wrong_;
    return wrong_answer(number, to, room_bytes);
  }
}

void Service::compute(const QueryMessage& query, int debtor, uint8_t* to) {
  const ServedLayer& layer = layers_[query.head.layer];
  const int64_t runs = query.head.runs, row_floats = shape_.record_floats();
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
                {rows, element_, int64_t(shape_.heads) * shape_.head_size, shape_.head_size, shape_.heads},
                layer.rule,
                {records, Element::float32, nullptr, nullptr},
                {},
                {records, record_starts}};
      attend(backend_, call, 1);
    }
    const bool stood = reads && loans_.finish(rights, run.sections);
    states[i] = int32_t(stood ? RunState::came : RunState::gone);
    // What others' pages gave must not leave.
    if (!stood) std::memset(records, 0, size_t(run.records() * run.rows * row_floats) * 4);
    rows += run.rows * shape_.query_bytes();
    records += run.records() * run.rows * row_floats;
    rights += run.sections;
  }
}

}  // namespace kvell
