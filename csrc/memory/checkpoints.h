// Where states are worth keeping (tests/oracle/eviction/checkpoints.py).
#pragma once
#include "eviction.h"
#include "holders.h"

namespace kvell::memory {

struct Cut {
  int64_t end;
  Sort sort;
};

// The cut that stands for a prompt's end.
int64_t prompt_end(int64_t prompt_tokens, int64_t alignment);

// Which prompts of a model have waypoints, and how far from their ends.
void plan_waypoints(const Groups& groups, Model& model);

// Lengths on the way of a prompt that are kept like its end.
void waypoints_of(const Holder& holder, std::vector<int64_t>& lengths);

// Cuts in (computed, until] of the holder.
void cuts_of(const Holder& holder, int64_t until, std::vector<Cut>& cuts);

// The first cut after what the holder has computed.
int64_t next_cut_of(const Holder& holder);

}  // namespace kvell::memory
