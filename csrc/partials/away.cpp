#include "away.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "attention/arguments.h"

namespace kvell {
namespace {

constexpr int64_t kLocalFloats = 1 << 20;  // what has no room there is computed once the records are in

QueryRun query_run(const AwayRun& run, int32_t rows) {
  return {run.first_section, int32_t(run.rights.size()), rows, 0};
}

template <class T>
uint8_t* put(uint8_t* to, const T* from, size_t count) {
  std::memcpy(to, from, count * sizeof(T));
  return to + count * sizeof(T);
}

}  // namespace

void Away::expect(std::vector<AwayRun> runs, std::chrono::nanoseconds patience) {
  for (const AwayRun& run : runs)
    if (run.creditor < 0 || run.creditor >= int64_t(creditors_.size()) || run.rights.empty())
      refuse("runs: no such creditor, or no section");
  std::stable_sort(runs.begin(), runs.end(), [](const AwayRun& a, const AwayRun& b) {
    return std::tie(a.group, a.request, a.first_section) < std::tie(b.group, b.request, b.first_section);
  });
  runs_ = std::move(runs);
  patience_ = patience;
  missed_.clear();
}

void Away::begin(const std::vector<AwayGroup>& groups) {
  deadline_ = std::chrono::steady_clock::now() + patience_;
  shape_ = {};
  missed_.clear();
  silent_.assign(creditors_.size(), false);
  check(groups);
  place(groups);
  if (!runs_.empty()) local_.resize(kLocalFloats);
  space_ = {local_.data(), int64_t(local_.size())};
}

void Away::fit(const RowShape& shape) {
  if (shape == shape_) return;
  shape_ = shape;
  for (auto& values : values_)
    if (int64_t(values.size()) < most_rows_ * shape_.record_floats())
      values.resize(size_t(most_rows_ * shape_.record_floats()));
  cut();
}

void Away::check(const std::vector<AwayGroup>& groups) const {
  for (size_t i = 0; i < runs_.size(); ++i) {
    const AwayRun& run = runs_[i];
    if (run.group < 0 || run.group >= int64_t(groups.size()) || !groups[run.group].is_full)
      refuse("runs: sections are elsewhere only in groups with full attention");
    const AwayGroup& group = groups[run.group];
    if (run.request < 0 || run.request >= group.batch.requests || group.batch.new_tokens(run.request) < 1)
      refuse("runs: no such request, or it has no query rows");
    const bool begins = i == 0 || runs_[i - 1].group != run.group || runs_[i - 1].request != run.request;
    const int64_t before = begins ? 0 : runs_[i - 1].first_section + int64_t(runs_[i - 1].rights.size());
    if (run.first_section != before) refuse("runs: a request's follow each other from section 0 on");
    const bool ends = i + 1 == runs_.size() || runs_[i + 1].group != run.group || runs_[i + 1].request != run.request;
    const int64_t end = (before + int64_t(run.rights.size())) * kSection;
    if (ends && end != int64_t(group.batch.first_positions[run.request]) * group.page_tokens)
      refuse("first_positions: a table does not begin where its request's runs end");
    if (end > group.batch.context_lens[run.request] - group.batch.new_tokens(run.request))
      refuse("context_lens: a query row lies among sections that are elsewhere");
  }
}

// Where the records of each run are to be.
void Away::place(const std::vector<AwayGroup>& groups) {
  starts_.assign(groups.size(), {});
  first_rows_.clear();
  rows_.clear();
  records_rows_.clear();
  size_t next = 0;
  most_rows_ = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    if (next == runs_.size() || runs_[next].group != int32_t(g)) continue;
    const Batch& batch = groups[g].batch;
    int64_t rows = 0;
    starts_[g].push_back(0);
    for (int32_t request = 0; request < batch.requests; ++request) {
      for (; next < runs_.size() && runs_[next].group == int32_t(g) && runs_[next].request == request; ++next) {
        first_rows_.push_back(batch.query_starts[request]);
        rows_.push_back(batch.new_tokens(request));
        records_rows_.push_back(rows);
        rows += query_run(runs_[next], 1).records() * rows_.back();
      }
      if (rows > INT32_MAX) refuse("runs: more records than can be counted");
      starts_[g].push_back(int32_t(rows));
    }
    most_rows_ = std::max(most_rows_, rows);
  }
}

bool Away::fits(const Message& message, const Creditor& creditor) const {
  const int64_t runs = int64_t(message.pieces.size());
  return whole_lines(query_bytes(shape_, runs, message.sections, message.rows)) +
             answer_bytes(shape_, runs, message.record_rows) <= creditor.room_bytes();
}

// Runs into messages that a creditor has room for: whole ones, or some of their rows.
void Away::cut() {
  asked_.assign(starts_.size(), std::vector<Asked>(creditors_.size()));
  for (size_t r = 0; r < runs_.size(); ++r) {
    const AwayRun& run = runs_[r];
    const Creditor& creditor = *creditors_[run.creditor];
    std::vector<Message>& messages = asked_[run.group][run.creditor].messages;
    const int64_t sections = int64_t(run.rights.size()), records = query_run(run, 1).records();
    for (int32_t row = 0; row < rows_[r];) {
      const auto with = [&](Message message, int32_t rows) {
        message.pieces.push_back({r, row, rows});
        message.sections += sections;
        message.rows += rows;
        message.record_rows += records * rows;
        return message;
      };
      int32_t rows = int32_t(rows_[r]) - row;
      if (!messages.empty() && fits(with(messages.back(), rows), creditor)) {
        messages.back() = with(std::move(messages.back()), rows);
      } else {
        while (rows > 1 && !fits(with({}, rows), creditor)) rows = (rows + 1) / 2;
        messages.push_back(with({}, rows));  // of one row that has no room: refused when it is posted
      }
      row += rows;
    }
  }
}

float* Away::record(int layer, const Piece& piece, int64_t index) {
  const int64_t row = records_rows_[piece.run] + index * rows_[piece.run] + piece.first_row;
  return values_[layer % 2].data() + row * shape_.record_floats();
}

bool Away::post_next(Creditor& creditor, Asked& asked, const AwayLayer& layer) {
  Message& message = asked.messages[asked.posted];
  const int64_t runs = int64_t(message.pieces.size());
  if (!fits(message, creditor)) return false;
  uint8_t* const at = creditor.begin(query_bytes(shape_, runs, message.sections, message.rows));
  message.number = ++number_;
  const QueryHead head{message.number,        layer.number,  int32_t(runs),  int32_t(message.sections),
                       int32_t(message.rows), shape_.heads, shape_.element, layer.scale,
                       layer.softcap};
  uint8_t* to = put(at, &head, 1);
  for (const Piece& piece : message.pieces) {
    const QueryRun run = query_run(runs_[piece.run], piece.rows);
    to = put(to, &run, 1);
  }
  for (const Piece& piece : message.pieces) to = put(to, runs_[piece.run].rights.data(), runs_[piece.run].rights.size());
  to = at + rows_at(runs, message.sections);
  const int64_t row_bytes = shape_.query_bytes();
  for (const Piece& piece : message.pieces)
    to = put(to, static_cast<const uint8_t*>(layer.query) + (first_rows_[piece.run] + piece.first_row) * row_bytes,
             size_t(piece.rows * row_bytes));
  if (!creditor.post()) return false;
  ++asked.posted;
  return true;
}

void Away::post(const AwayLayer& layer) {
  fit(layer.shape);
  for (size_t c = 0; c < creditors_.size(); ++c) {
    Asked& asked = asked_[layer.group][c];
    asked.posted = 0;
    while (!silent_[c] && asked.posted < asked.messages.size())
      if (!post_next(*creditors_[c], asked, layer)) break;
  }
}

void Away::wait(const AwayLayer& layer) {
  for (size_t c = 0; c < creditors_.size(); ++c) wait_for(c, layer);
}

// As answers come, what was refused for want of room is sent. Whoever refuses with nothing of this
// layer under way, or answers too late, is left alone for the rest of the pass.
void Away::wait_for(size_t c, const AwayLayer& layer) {
  Creditor& creditor = *creditors_[c];
  Asked& asked = asked_[layer.group][c];
  for (size_t taken = 0; taken < asked.messages.size(); ++taken) {
    while (!silent_[c] && asked.posted < asked.messages.size())
      if (!post_next(creditor, asked, layer)) {
        silent_[c] = asked.posted == taken;
        break;
      }
    const Deadline begun = std::chrono::steady_clock::now();
    if (!silent_[c] && !take(creditor, asked.messages[taken], layer.number)) {
      silent_[c] = true;
      deadline_ += std::chrono::steady_clock::now() - begun;  // the others' answers are not late for it
    }
    if (silent_[c]) lose(asked.messages[taken], layer.number);
  }
}

// False: nothing came in time.
bool Away::take(Creditor& creditor, const Message& message, int layer) {
  AnswerHead head{};
  AnswerBytes answer{};
  do {  // answers to queries of earlier passes, which were given up
    answer = creditor.take(deadline_);
    if (!answer.at) return false;
    if (answer.bytes < int64_t(sizeof(head))) continue;
    std::memcpy(&head, answer.at, sizeof(head));
  } while (head.number != message.number);
  const int64_t runs = int64_t(message.pieces.size());
  if (head.answered != int32_t(Answered::fine) || head.runs != runs ||
      answer.bytes != answer_bytes(shape_, runs, message.record_rows)) {
    lose(message, layer);
    return true;
  }
  const uint8_t* from = answer.at + records_at(runs);
  for (int64_t i = 0; i < runs; ++i) {
    const Piece& piece = message.pieces[i];
    const int64_t bytes = piece.rows * shape_.record_floats() * 4;
    const int64_t records = query_run(runs_[piece.run], 1).records();
    int32_t state;
    std::memcpy(&state, answer.at + sizeof(head) + i * 4, 4);
    for (int64_t index = 0; index < records; ++index, from += bytes)
      if (state == int32_t(RunState::came)) std::memcpy(record(layer, piece, index), from, size_t(bytes));
    if (state != int32_t(RunState::came)) lose(piece, layer);
  }
  return true;
}

void Away::lose(const Message& message, int layer) {
  for (const Piece& piece : message.pieces) lose(piece, layer);
}

// Records that a fold passes over, so that whatever lies there harms nobody.
void Away::lose(const Piece& piece, int layer) {
  missed_.insert(runs_[piece.run].request);
  const int64_t records = query_run(runs_[piece.run], 1).records(), each = 2 + shape_.value_size;
  for (int64_t index = 0; index < records; ++index) {
    float* at = record(layer, piece, index);
    for (int64_t row = 0; row < int64_t(piece.rows) * shape_.heads; ++row, at += each) at[0] = -__builtin_inff();
  }
}

}  // namespace kvell
