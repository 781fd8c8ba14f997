// Requests whose first tokens lie on another instance (tests/oracle/core/lending.py).
#include <algorithm>
#include <stdexcept>

#include "core.h"

namespace kvell::memory {
namespace {

std::string why_not(const Holder& h, int64_t away) {
  const Model& model = *h.model;
  if (model.has_dropping) return "its model drops tokens";
  if (model.counts_images) return "its model counts images in pages of the text";
  if (!model.full_alignment) return "its model has no full attention";
  if (h.is_reservation || h.lease_until) return "it is a lease or a reservation";
  // A page that was moved stays until the next step, and is copied whatever becomes of it.
  for (const Source& source : h.sources)
    if (source.length || away < h.facts.away_tokens)
      return "copies to its pages are pending";
  if (away < 0 || away > h.computed)
    return std::to_string(away) + " of " + std::to_string(h.computed) + " computed tokens";
  if (away % model.full_alignment) return std::to_string(away) + " tokens end inside a page";
  return "";
}

}  // namespace

void Core::send_away(int32_t handle, int64_t away_tokens) {
  Holder& h = holder(handle);
  const std::string reason = why_not(h, away_tokens);
  if (!reason.empty())
    throw std::invalid_argument("tokens of handle " + std::to_string(handle) +
                                " cannot be remote: " + reason);
  // What a holder still needs may become less although no page is freed.
  turned_away_ = {};
  publisher_.send_away(h, away_tokens);
  foresee(store_.groups, h);
}

void Publisher::send_away(Holder& h, int64_t away_tokens) {
  h.facts.away_tokens = away_tokens;
  leave_behind(h);
  for (const int32_t g : h.model->own) {
    GroupPages& held = h.groups[g];
    // A drafter may have had fewer pages than that.
    if (store_.groups[g].kind == Kind::kFull && held.slots.empty())
      held.first = std::max(held.first, kept_from(store_.groups[g], h.facts, h.computed));
  }
}

// Names pages that came home where the index has a hole; others' pages stay named.
void Publisher::publish_returned(Holder& h) {
  for (const int32_t g : h.model->own) {
    GroupPages& held = h.groups[g];
    if (!held.returned_to) continue;
    name_pages(h, g, held.first, std::min(held.returned_to, held.published));
    held.returned_to = 0;
  }
}

}  // namespace kvell::memory
