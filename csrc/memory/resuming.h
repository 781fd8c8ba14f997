// Where later prompts are likely to resume, and when what they need there counts as accessed
// (tests/oracle/core/resuming.py).
#pragma once
#include "checkpoints.h"
#include "holders.h"
#include "store.h"

namespace kvell::memory {

// Can the model resume only where something was kept for it?
inline bool needs_an_end(const Model& model) { return model.has_states || model.has_windows; }

class Resuming {
 public:
  explicit Resuming(const Store& store) : store_(store) {}

  // Looks at a holder: what follows is of it.
  void find(const Holder& holder);
  // Lengths at which a later prompt is most likely to resume; those on a long prompt's way that
  // it may part at.
  const std::vector<int64_t>& points() const { return points_; }
  const std::vector<int64_t>& waypoints() const { return waypoints_; }

  // Is a window's page at a position one that some of the lengths are resumed from?
  bool is_worth(const Holder& holder, int32_t group, int64_t position,
                const std::vector<int64_t>& lengths) const;
  // The step at which the holder is expected to end: it answers with a token a step.
  int64_t end_step(const Holder& holder) const {
    return store_.step + std::max<int64_t>(0, holder.expected_tokens - holder.num_tokens());
  }
  // When what is kept on the way counts as accessed: no later than now where
  // it is most of what a window leaves behind.
  int64_t waypoint_step(const Holder& holder) const {
    return holder.model->waypoints_overlap ? store_.step : end_step(holder);
  }

 private:
  const Store& store_;
  std::vector<int64_t> points_, waypoints_;
};

}  // namespace kvell::memory
