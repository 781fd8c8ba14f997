// Cuts a call into tasks. Nothing here can change a result, only how fast it comes.
#include <algorithm>

#include "records.h"

namespace kvell {
namespace {

constexpr int32_t kTileRows = 96;       // query rows, at least, that share one packing of K and V
constexpr int64_t kWideNumbers = 24 << 10;  // of queries, where there are tasks enough of so many
constexpr int32_t kFewRows = 12;       // below this a task takes all heads: it is bound by memory
constexpr int64_t kThreadWork = 1 << 18;  // multiply-adds (some 25 us) that are worth waking a thread
constexpr int64_t kTasksPerThread = 3; // fewer than this and long contexts are split
constexpr int64_t kThreadRecords = 1 << 20;  // floats of records for each thread, at most

int32_t first_section(Range range) { return range.begin / kSection; }
int32_t last_section(Range range) {
  return range.end <= range.begin ? first_section(range) : (range.end - 1) / kSection + 1;
}

// Rows that share a packing where there are many: what they need stays in the second cache.
int32_t wide_rows(int32_t head_size) {
  if (head_size > 256) return kTileRows;
  return std::clamp(int32_t(kWideNumbers / head_size), 2 * kTileRows, 4 * kTileRows);
}

// Rows of one request that are computed together, all sections of them.
void add_units(const Call& call, int32_t request, int32_t rows, bool split_heads,
               std::vector<Task>& units) {
  const int32_t begin = call.batch.query_starts[request];
  const int32_t end = call.batch.query_starts[request + 1];
  const int32_t group = call.group_heads(), kv_heads = call.layer.kv_heads;
  const int32_t tile = std::max(1, rows / group);
  const bool few = (end - begin) * group <= kFewRows;
  const int32_t heads = few && !split_heads ? kv_heads : 1;
  for (int32_t token = begin; token < end; token += tile)
    for (int32_t head = 0; head < kv_heads; head += heads) {
      Task unit{request, token, std::min(token + tile, end), head, head + heads, 0, 0, nullptr};
      const Range range = readable(call, unit);
      unit.section_begin = first_section(range);
      unit.section_end = last_section(range);
      units.push_back(unit);
    }
}

std::vector<Task> all_units(const Call& call, int32_t rows, bool split_heads) {
  std::vector<Task> units;
  for (int32_t request = 0; request < call.batch.requests; ++request)
    add_units(call, request, rows, split_heads, units);
  return units;
}

int64_t cost(const Call& call, const Task& task) {
  const Range range = readable(call, task);
  const int64_t sections = int64_t(task.section_end - task.section_begin) * kSection;
  return std::min<int64_t>(range.end - range.begin, sections) * (4 + task_rows(call, task));
}

int64_t floats_of(const Call& call, const std::vector<Task>& units) {
  const int64_t row_floats = record_floats(call.layer.value_size());
  int64_t floats = 0;
  for (const Task& unit : units)
    floats += int64_t(unit.section_end - unit.section_begin) * task_rows(call, unit) * row_floats;
  return floats;
}

void split_sections(const Call& call, const std::vector<Task>& units, float* record,
                    std::vector<Fold>& folds, Plan& plan) {
  const int64_t row_floats = record_floats(call.layer.value_size());
  for (const Task& unit : units) {
    const int32_t sections = unit.section_end - unit.section_begin;
    folds.push_back({unit, record, sections});
    for (int32_t s = 0; s < sections; ++s, record += task_rows(call, unit) * row_floats) {
      Task part = unit;
      part.section_begin = unit.section_begin + s;
      part.section_end = part.section_begin + 1;
      part.record = record;
      plan.tasks.push_back(part);
    }
  }
}

int64_t sections_of(const std::vector<Task>& units) {
  int64_t sections = 0;
  for (const Task& unit : units) sections += unit.section_end - unit.section_begin;
  return sections;
}

int useful_threads(const Call& call, const std::vector<Task>& units, int threads) {
  int64_t work = 0;
  for (const Task& unit : units) {
    const Range range = readable(call, unit);
    work += int64_t(std::max(0, range.end - range.begin)) * task_rows(call, unit);
  }
  return int(std::min<int64_t>(threads, 1 + work * call.layer.head_size / kThreadWork));
}

void largest_first(const Call& call, std::vector<Task>& tasks) {
  std::stable_sort(tasks.begin(), tasks.end(), [&](const Task& a, const Task& b) {
    return cost(call, a) > cost(call, b);
  });
}

}  // namespace

Range readable(const Call& call, const Task& task) {
  const Batch& batch = call.batch;
  const int32_t first = batch.position(task.request, task.token_begin);
  const int32_t last = batch.position(task.request, task.token_end - 1);
  const int32_t begin = std::max(batch.table_begin(task.request, call.layer.page_tokens),
                                 call.rule.first_readable(first));
  return {begin, std::min(last + 1, batch.table_end(task.request, call.layer.page_tokens))};
}

namespace {

// Takes the units that begin with records of others out of all.
std::vector<Task> begun_elsewhere(const Call& call, std::vector<Task>& units) {
  const auto local = std::stable_partition(units.begin(), units.end(), [&](const Task& unit) {
    return call.elsewhere.count(unit.request, call.batch) == 0;
  });
  std::vector<Task> found(local, units.end());
  units.erase(local, units.end());
  return found;
}

// Computes what it can of some units before others' records are in.
void put_apart(const Call& call, const std::vector<Task>& units, RecordSpace& apart, Plan& plan) {
  int64_t used = 0;
  for (const Task& unit : units) {
    const int64_t floats = floats_of(call, {unit});
    if (used + floats > apart.floats) {
      plan.later.push_back(unit);
      continue;
    }
    split_sections(call, {unit}, apart.at + used, plan.later_folds, plan);
    used += floats;
  }
  apart.used = std::max(apart.used, used);
}

Plan planned(const Call& call, int threads, RecordSpace* space, RecordSpace* apart = nullptr) {
  Plan plan;
  std::vector<Task> units = all_units(call, wide_rows(call.layer.head_size), false);
  threads = plan.threads = useful_threads(call, units, threads);
  const int64_t wanted = threads > 1 ? threads * kTasksPerThread : 0;
  if (int64_t(units.size()) < wanted) units = all_units(call, kTileRows, false);
  bool split = int64_t(units.size()) < wanted;
  if (split && int64_t(units.size()) < threads && sections_of(units) < threads)
    units = all_units(call, kTileRows, true);
  std::vector<Task> begun;
  if (apart) begun = begun_elsewhere(call, units);
  const int64_t floats = split ? floats_of(call, units) : 0;
  if (space && floats > space->floats) {
    split = false;
    units = all_units(call, kTileRows, true);
    if (apart) begun = begun_elsewhere(call, units);
  }
  if (split) {
    if (!space) plan.records.resize(floats);
    if (space) space->used = std::max(space->used, floats);
    split_sections(call, units, space ? space->at : plan.records.data(), plan.folds, plan);
  } else {
    plan.tasks = units;
  }
  if (apart) put_apart(call, begun, *apart, plan);
  if (threads > 1) largest_first(call, plan.tasks);
  for (const Task& unit : units) plan.max_rows = std::max(plan.max_rows, task_rows(call, unit));
  return plan;
}

}  // namespace

Plan make_plan(const Call& call, int threads) { return planned(call, threads, nullptr); }

Plan make_partials_plan(const Call& call, int threads) {
  Plan plan;
  std::vector<Task> folded, units = all_units(call, wide_rows(call.layer.head_size), false);
  plan.threads = useful_threads(call, units, threads);
  if (sections_of(units) < plan.threads) units = all_units(call, kTileRows, true);
  for (const Task& unit : units) {
    plan.max_rows = std::max(plan.max_rows, task_rows(call, unit));
    if (call.partials.count(unit.request, call.batch) == 1) {
      folded.push_back(unit);
    } else {
      for (int32_t s = unit.section_begin; s < unit.section_end; ++s) {
        Task part = unit;
        part.section_begin = s;
        part.section_end = s + 1;
        plan.tasks.push_back(part);
      }
    }
  }
  if (plan.threads > 1 && int64_t(folded.size() + plan.tasks.size()) < plan.threads * kTasksPerThread) {
    plan.records.resize(floats_of(call, folded));
    split_sections(call, folded, plan.records.data(), plan.folds, plan);
  } else {
    plan.tasks.insert(plan.tasks.end(), folded.begin(), folded.end());
  }
  if (plan.threads > 1) largest_first(call, plan.tasks);
  return plan;
}

Plan make_plan_in(RecordSpace& space, const Call& call, int threads) {
  return planned(call, threads, &space);
}

Plan make_plan_apart(RecordSpace& space, RecordSpace& apart, const Call& call, int threads) {
  return planned(call, threads, &space, &apart);
}

int32_t most_task_rows(const Call& call) {
  const int32_t group = call.group_heads();
  return std::max(std::max(1, wide_rows(call.layer.head_size) / group) * group,
                  kFewRows * call.layer.kv_heads);
}

int64_t most_record_floats(const Call& call, int threads, int64_t longest_tokens) {
  const int64_t units = threads > 1 ? threads * kTasksPerThread - 1 : 0;
  const int64_t sections = longest_tokens / kSection + 1;
  const int64_t rows = std::max(kTileRows, kFewRows * call.layer.kv_heads);
  const int64_t floats = units * sections * rows * record_floats(call.layer.value_size());
  return std::min(floats, threads * kThreadRecords);
}

}  // namespace kvell
