// Memory that a caller lends for the records of split contexts.
#pragma once
#include "task.h"

namespace kvell {

struct RecordSpace {
  float* at;
  int64_t floats;
  int64_t used = 0;  // by the largest plan so far: plans that run in turn share the space
};

// As `make_plan`, with its records in lent memory. Where they have no room there, rows are cut
// by heads instead of by sections, which changes no result.
Plan make_plan_in(RecordSpace& space, const Call& call, int threads);

// The same for a call with `elsewhere`, of which only the starts need to be known: tasks and folds wait
// for no record, and what does comes later. `apart` lends the records of those requests.
Plan make_plan_apart(RecordSpace& space, RecordSpace& apart, const Call& call, int threads);

// Rows of any task of a call of this shape.
int32_t most_task_rows(const Call& call);

// Floats that records are worth lending, for contexts of so many tokens.
int64_t most_record_floats(const Call& call, int threads, int64_t longest_tokens);

}  // namespace kvell
