#include "checkpoints.h"

namespace kvell::memory {
namespace {

// The names and values of tests/oracle/eviction/checkpoints.py.
constexpr int64_t kFirstCuts[] = {64, 128, 256};
constexpr int64_t kCutTokens = 512;
constexpr int64_t kCoarseTokens = 2048;
constexpr int64_t kEndTokens = 64;
constexpr int64_t kLastWaypoint = 16384;
constexpr int64_t kWaypointPart = 4;
constexpr int64_t kDearWaypoint = 8192;
constexpr int64_t kDearPart = 10;

int64_t aligned(int64_t cut, int64_t alignment) { return cut / alignment * alignment; }

// Where the waypoint so far before the prompt's end is; 0 if there is none.
int64_t waypoint(const Holder& h, int64_t distance) {
  const int64_t alignment = h.model->alignment, nearest = h.model->waypoint_tokens;
  const int64_t length = prompt_end(h.facts.prompt_tokens, alignment) - distance;
  const bool is_long = h.facts.prompt_tokens >= h.model->waypoint_from;
  if (!nearest || !is_long || length < nearest) return 0;
  return aligned(aligned(length, kCutTokens), alignment);
}

// Bytes of what one resumes from, with windows up to `tokens`, times the model's alignment.
int64_t resume_bytes(const Groups& groups, const Model& model, int64_t tokens) {
  int64_t bytes = 0;
  for (const int32_t g : model.own) {
    const Rules& group = groups[g];
    if (group.kind == Kind::kState) bytes += model.alignment * group.page_bytes * group.slices;
    // Sliding windows of neighbours overlap.
    const bool slides = group.kind == Kind::kSliding;
    const int64_t window = slides ? std::min(group.window_tokens, tokens) : group.window_tokens;
    if (group.is_window())
      bytes += model.alignment / group.page_tokens * group.page_bytes * window;
  }
  return bytes;
}

}  // namespace

void cuts_of(const Holder& h, int64_t until, std::vector<Cut>& cuts) {
  const int64_t alignment = h.model->alignment, prompt = h.facts.prompt_tokens;
  cuts.clear();
  const auto add = [&](int64_t cut, Sort sort) {
    const int64_t end = aligned(cut, alignment);
    if (h.computed < end && end <= until) cuts.push_back({end, sort});
  };
  const auto add_every = [&](int64_t tokens, Sort sort) {
    for (int64_t cut = aligned(h.computed, tokens); cut <= until + alignment; cut += tokens)
      add(cut, sort);
  };
  // Of several sorts at one end the last counts.
  add(h.matched_tokens, Sort::kBranch);
  add(prompt_end(prompt, alignment), Sort::kPromptEnd);
  for (int64_t d = h.model->waypoint_tokens, way; (way = waypoint(h, d)); d *= 2)
    add(way, Sort::kWaypoint);
  add_every(kCoarseTokens, Sort::kCoarse);
  add(aligned(prompt, kEndTokens), Sort::kFine);
  add_every(kCutTokens, Sort::kFine);
  for (const int64_t cut : kFirstCuts) add(cut, Sort::kFine);
  std::sort(cuts.begin(), cuts.end(), [](const Cut& a, const Cut& b) {
    return a.end != b.end ? a.end > b.end : a.sort > b.sort;
  });
  const auto same_end = [](const Cut& a, const Cut& b) { return a.end == b.end; };
  cuts.erase(std::unique(cuts.begin(), cuts.end(), same_end), cuts.end());
}

int64_t prompt_end(int64_t prompt_tokens, int64_t alignment) {
  const int64_t unit = prompt_tokens >= kCutTokens ? kCutTokens : kEndTokens;
  return aligned(aligned(prompt_tokens, unit), alignment);
}

void plan_waypoints(const Groups& groups, Model& model) {
  int64_t token_bytes = 0;
  for (const int32_t g : model.own)
    if (groups[g].kind == Kind::kFull)
      token_bytes += model.alignment / groups[g].page_tokens * groups[g].page_bytes;
  const int64_t end_bytes = resume_bytes(groups, model, kNever);
  if (!token_bytes || !end_bytes) return;
  for (int64_t tokens = kCoarseTokens; tokens <= kLastWaypoint; tokens *= 2) {
    const int64_t taken = resume_bytes(groups, model, tokens) * kWaypointPart;
    if (taken > std::max(tokens * token_bytes, end_bytes)) continue;
    model.waypoint_tokens = tokens;
    model.waypoints_overlap = taken > tokens * token_bytes;
    return;
  }
  // Dear ones, for prompts that take many times as much.
  model.waypoint_tokens = kDearWaypoint;
  model.waypoint_from = ceil_div(end_bytes * kDearPart, token_bytes);
}

void waypoints_of(const Holder& h, std::vector<int64_t>& lengths) {
  lengths.clear();
  for (int64_t d = h.model->waypoint_tokens, way; (way = waypoint(h, d)); d *= 2)
    lengths.push_back(way);
}

int64_t next_cut_of(const Holder& h) {
  const int64_t alignment = h.model->alignment;
  // The first multiple that, aligned, lies beyond.
  const int64_t beyond = aligned(h.computed, alignment) + alignment;
  int64_t next = aligned(ceil_div(beyond, kCutTokens) * kCutTokens, alignment);
  const auto consider = [&](int64_t cut) {
    const int64_t end = aligned(cut, alignment);
    if (end > h.computed) next = std::min(next, end);
  };
  consider(aligned(h.facts.prompt_tokens, kEndTokens));
  consider(h.matched_tokens);
  for (const int64_t cut : kFirstCuts) consider(cut);
  return next;
}

}  // namespace kvell::memory
