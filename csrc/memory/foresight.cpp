#include "foresight.h"

namespace kvell::memory {
namespace {

// Computed tokens at which more of the holder is whole.
int64_t next_whole(const Holder& h) {
  if (!h.publishes) return kNever;
  int64_t next = kNever;
  for (const int32_t size : h.model->page_sizes)
    next = std::min(next, (h.published / size + 1) * size);
  if (h.model->has_cross)
    for (const Image& image : h.facts.images)
      if (image.end() > h.published) next = std::min(next, image.end());
  return next;
}

}  // namespace

void foresee(const Groups& groups, Holder& h) {
  h.room = {};
  h.next_event = next_whole(h);
  if (h.drops && h.computed < h.facts.prompt_tokens)
    h.next_event = std::min(h.next_event, h.facts.prompt_tokens);
  bool always = !h.sources.empty() || !h.checkpoints.empty();
  for (const int32_t g : h.model->own) {
    const Rules& group = groups[g];
    const GroupPages& held = h.groups[g];
    const Room room = room_of(group, h.facts, held.end(), h.computed);
    h.room.from = std::max(h.room.from, room.from);
    h.room.to = std::min(h.room.to, room.to);
    // What came home has to be asked for, whatever else is computed, and then named.
    if (returning_pages(group, h.facts, held.first)) h.room.to = -1;
    always |= held.returned_to > 0;
    if (group.is_window()) h.next_event = std::min(h.next_event, group.behind_at(held.first));
    always |= group.kind == Kind::kVision && !held.slots.empty();
  }
  if (always) h.next_event = 0;
}

}  // namespace kvell::memory
