// The unit of parallel work, and how a context is cut for reduction.
//
// A (token, head) is reduced over spans of positions counted from position 0:
//
//   position 0        64       128              512
//   |--- span ---|--- span ---| …             |--- span ---| …
//   |------------------- section -------------|-- section --…
//
// Within a section: online softmax, span by span. Sections start afresh and are
// folded together in order. Both cuts depend on positions alone, so neither the
// batch, the prefill chunk, the pages nor the number of threads can change a result.
#pragma once
#include <cstdint>
#include <vector>

#include "views.h"

namespace kvell {

constexpr int32_t kSpan = 64;
constexpr int32_t kSection = 512;

// New tokens [token_begin, token_end) of a request × kv heads [head_begin, head_end),
// over sections [section_begin, section_end). With `record` null the task finishes its
// rows itself; else it covers one section and leaves a record per row there.
struct Task {
  int32_t request;
  int32_t token_begin, token_end;
  int32_t head_begin, head_end;
  int32_t section_begin, section_end;
  float* record;

  int32_t tokens() const { return token_end - token_begin; }
  int32_t heads() const { return head_end - head_begin; }
};

// Positions that any row of the task may read: its pages, cut by window and causality.
struct Range {
  int32_t begin, end;
};
Range readable(const Call& call, const Task& task);

inline int32_t task_rows(const Call& call, const Task& task) {
  return task.tokens() * task.heads() * call.group_heads();
}

// Floats of one row's record: maximum, denominator, and the unnormalised output from
// float 16 on, so that it stays aligned.
inline int64_t record_floats(int32_t value_size) { return 16 + (value_size + 31) / 32 * 32; }

// Sections of one unit of rows, computed apart and folded in order afterwards.
struct Fold {
  Task rows;
  const float* records;
  int32_t sections;
};

struct Plan {
  std::vector<Task> tasks;
  std::vector<Fold> folds;
  std::vector<float> records;
  // Of requests whose first sections are elsewhere (make_plan_apart): to be done once their records
  // are in, as folds of the tasks before, or whole.
  std::vector<Fold> later_folds;
  std::vector<Task> later;
  int32_t max_rows = 0;
  int threads = 1;  // at most as many as were offered
};

Plan make_plan(const Call& call, int threads);

// For a call that leaves records for another instance (Call::partials): each section's is a task,
// but all sections of a request that leaves one record make one.
Plan make_partials_plan(const Call& call, int threads);

}  // namespace kvell
