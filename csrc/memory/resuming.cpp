#include "resuming.h"

namespace kvell::memory {

void Resuming::find(const Holder& h) {
  points_.clear();
  waypoints_of(h, waypoints_);
  if (!needs_an_end(*h.model)) return;
  const int64_t alignment = h.model->alignment;
  const int64_t branch = h.matched_tokens / alignment * alignment;
  const int64_t prompt = prompt_end(h.facts.prompt_tokens, alignment);
  if (branch) points_.push_back(branch);
  if (store_.usefulness.rank(Sort::kPromptEnd) == kNormal && prompt && prompt != branch)
    points_.push_back(prompt);
  std::sort(points_.begin(), points_.end());
}

bool Resuming::is_worth(const Holder& h, int32_t g, int64_t position,
                        const std::vector<int64_t>& lengths) const {
  const Rules& group = store_.groups[g];
  for (const int64_t length : lengths)
    if (resumed_from(group, h.facts, length) <= position && position < length / group.page_tokens)
      return true;
  return false;
}

}  // namespace kvell::memory
