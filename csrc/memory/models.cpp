#include "models.h"

#include <algorithm>
#include <numeric>

#include "checkpoints.h"

namespace kvell::memory {
namespace {

constexpr int64_t kRenewPages = 32;  // of a window in a step, at most

void add_to(Model& model, int32_t index, const Rules& group) {
  model.own.push_back(index);
  model.has_states |= group.kind == Kind::kState;
  model.has_windows |= group.is_window();
  if (group.is_window())
    model.renew_steps =
        std::max(model.renew_steps, group.window_tokens / group.page_tokens / kRenewPages);
  model.has_cross |= group.kind == Kind::kCross;
  model.has_embeddings |= group.kind == Kind::kVision;
  model.has_dropping |= group.kind == Kind::kDropping;
  model.counts_images |= group.counts_images;
  if (!group.counts_tokens()) return;
  const int64_t size = group.page_tokens;
  if (std::find(model.page_sizes.begin(), model.page_sizes.end(), size) == model.page_sizes.end())
    model.page_sizes.push_back(group.page_tokens);
  model.alignment = std::lcm(model.alignment, size);
  if (group.required_for_hit) model.hit_alignment = std::lcm(model.hit_alignment, size);
  if (group.kind == Kind::kFull)
    model.full_alignment = std::lcm(std::max<int64_t>(model.full_alignment, 1), size);
}

}  // namespace

void Models::add(size_t first, const std::vector<std::string>& names) {
  for (size_t i = 0; i < names.size(); ++i)
    add_to(models_[names[i]], int32_t(first + i), groups_[first + i]);
  for (auto& [name, model] : models_) plan_waypoints(groups_, model);
}

const Model& Models::at(const std::string& name) const {
  const auto found = models_.find(name);
  if (found == models_.end()) throw UnknownModel{name};
  return found->second;
}

}  // namespace kvell::memory
