// The part of a step's attention that others compute: queries out, records back, layer by layer.
#pragma once
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "attention/records.h"
#include "message.h"
#include "seam.h"

namespace kvell {

// Consecutive sections of one request, at one creditor.
struct AwayRun {
  int32_t group, request;  // of the step's groups of keys and values; of the batch
  int32_t creditor;
  int32_t first_section;
  std::vector<uint64_t> rights;  // to read them, one for each section
};

// One group's batch, as far as others need it.
struct AwayGroup {
  Batch batch;
  int32_t page_tokens;
  bool is_full;  // all of its layers read everything before a token
};

// A layer's part of a pass: which it is, how it attends, and its query rows [tokens, heads, head_size].
struct AwayLayer {
  int number, group;
  RowShape shape;
  float scale, softcap;
  const void* query;
};

// Kept from step to step, with its memory. Records of a layer are in one of two buffers, so that
// one of an earlier layer never meets those at hand.
class Away {
 public:
  // Queries are numbered from `number` + 1 on; answers to queries of other numbers are passed over.
  Away(std::vector<std::shared_ptr<Creditor>> creditors, uint64_t number)
      : creditors_(std::move(creditors)), number_(number) {}

  // What the next pass asks for. Runs of a request follow each other from section 0 on.
  void expect(std::vector<AwayRun> runs, std::chrono::nanoseconds patience);

  // Of the last pass: requests that lack records of others. What was computed for them counts nothing.
  std::vector<int32_t> missed() const { return {missed_.begin(), missed_.end()}; }

  // By a pass, before it writes anything; its deadline is the patience from now on. Throws
  // std::invalid_argument if the runs do not fit the groups.
  void begin(const std::vector<AwayGroup>& groups);

  bool reads(int group) const { return !starts_[group].empty(); }

  // The rows of the layers that follow have this shape; those of all layers of most models have one.
  void fit(const RowShape& shape);

  // Sends the layer's query rows, as far as creditors take them at once.
  void post(const AwayLayer& layer);

  // Returns when the layer's records are in, or known not to come.
  void wait(const AwayLayer& layer);

  // Where the layer's are, until two layers later, or until rows of another shape follow.
  Records records(int layer, int group) {
    return {values_[layer % 2].data(), starts_[group].data()};
  }

  // Where those of each request begin, in rows of all heads; the last is their number.
  std::vector<int32_t>& starts(int group) { return starts_[group]; }

  // For records of what is here of the same requests.
  RecordSpace& space() { return space_; }

 private:
  // Some rows of a run, in a message.
  struct Piece {
    size_t run;
    int32_t first_row, rows;
  };
  struct Message {
    std::vector<Piece> pieces;
    int64_t sections = 0, rows = 0, record_rows = 0;
    uint64_t number = 0;
  };
  // What one creditor is asked for one group, in each of its layers.
  struct Asked {
    std::vector<Message> messages;
    size_t posted = 0;  // of the layer at hand
  };

  void check(const std::vector<AwayGroup>& groups) const;
  void place(const std::vector<AwayGroup>& groups);
  void cut();
  bool fits(const Message& message, const Creditor& creditor) const;
  bool post_next(Creditor& creditor, Asked& asked, const AwayLayer& layer);
  void wait_for(size_t creditor, const AwayLayer& layer);
  bool take(Creditor& creditor, const Message& message, int layer);
  void lose(const Message& message, int layer);
  void lose(const Piece& piece, int layer);
  float* record(int layer, const Piece& piece, int64_t index);

  std::vector<std::shared_ptr<Creditor>> creditors_;
  std::vector<AwayRun> runs_;
  std::chrono::nanoseconds patience_{0};
  Deadline deadline_;
  RowShape shape_{};
  int64_t most_rows_ = 0;                     // of the records of any group
  std::set<int32_t> missed_;
  std::vector<bool> silent_;                  // by creditor: not asked any more in this pass
  std::vector<std::vector<int32_t>> starts_;  // by group, of records; empty: it reads nothing elsewhere
  std::vector<int64_t> first_rows_, rows_, records_rows_;  // by run: query rows, their number, and where records begin
  std::vector<std::vector<Asked>> asked_;     // by group, by creditor
  std::vector<float> values_[2], local_;
  RecordSpace space_{};
  uint64_t number_;
};

}  // namespace kvell
