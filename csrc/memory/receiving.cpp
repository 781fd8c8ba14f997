// Holders whose computed tokens come from elsewhere: what they hold of the index, and what not
// (tests/oracle/core/receiving.py).
#include <algorithm>

#include "publishing.h"

namespace kvell::memory {
namespace {

// Pages of the images that end within so many tokens.
int64_t pages_to(const Rules& group, const Facts& facts, int64_t tokens) {
  int64_t pages = 0;
  for (const Image& image : facts.images)
    if (image.end() <= tokens) pages += image_pages(group, image);
  return pages;
}

// Position after the last page that a holder which was just opened may have.
int64_t most_pages(const Rules& group, const Holder& h, int64_t end) {
  if (group.kind == Kind::kVision) return end;
  if (group.kind == Kind::kCross) return pages_to(group, h.facts, h.hit_tokens);
  return group.counts_tokens() ? h.hit_tokens / group.page_tokens : 0;
}

}  // namespace

// Has it pages beside its hit, or some that no position tells, or would an image come in part?
bool Publisher::cannot_receive(const Holder& h, int64_t computed) const {
  if (h.computed > h.hit_tokens || !h.publishes || h.facts.cuts_image(computed)) return true;
  for (const int32_t g : h.model->own) {
    const GroupPages& held = h.groups[g];
    if (!held.slots.empty() && held.end() > most_pages(store_.groups[g], h, held.end()))
      return true;
  }
  return false;
}

// So many tokens are computed elsewhere; what windows would have left, and embeddings that were
// read, are not needed.
void Publisher::receive(Holder& h, int64_t computed) {
  let_sources_go(h, true);
  h.receiving = true;
  h.computed = computed;
  leave_behind(h);
  for (const int32_t g : h.model->own) {
    GroupPages& held = h.groups[g];
    if (held.slots.empty())
      held.first = std::max(held.first, resumed_from(store_.groups[g], h.facts, computed));
  }
  take_known(h);
}

// Holds what the index knows behind the hit. Whole pages, and pages of images, up to the first that
// is missing are the holder's; a request also keeps pages of tokens behind that, and what ends with
// the computed tokens, to copy it to its new pages.
void Publisher::take_known(Holder& h) {
  store_.tree.match(h.root, {h.prompt.data(), 0, h.computed}, *h.model, path_);
  if (path_.node == kNoNode) return;
  for (const int32_t g : h.model->own) {
    if (store_.groups[g].kind == Kind::kCross)
      take_images(h, g);
    else if (store_.groups[g].counts_tokens())
      take_pages(h, g);
    if (!h.lease_until && path_.length == h.computed) keep_end(h, g);
  }
}

void Publisher::take_images(Holder& h, int32_t g) {
  GroupPages& held = h.groups[g];
  int64_t position = 0;
  for (const Image& image : h.facts.images) {
    const int64_t begin = position, end = begin + image_pages(store_.groups[g], image);
    if (image.end() > path_.length) break;
    for (position = std::max(begin, held.end()); position < end; ++position) {
      const int32_t part = int32_t(position - begin);
      const int32_t slot = store_.tree.page_at(path_.node, g, image.end(), part);
      if (slot == kNoPage) break;
      store_.pool.acquire(slot);
      held.slots.tail().push_back(slot);
    }
    if (position < end) break;
    position = end;
  }
  held.published = std::max(held.published, held.end());
}

void Publisher::take_pages(Holder& h, int32_t g) {
  const int64_t size = store_.groups[g].page_tokens;
  GroupPages& held = h.groups[g];
  const std::vector<int32_t>& whole = path_.found[g].whole;
  const int64_t known = std::min(path_.length / size, int64_t(whole.size()));
  for (int64_t p = held.end(); p < known; ++p) {
    if (p > held.end() && h.lease_until) break;
    if (whole[p] == kNoPage) continue;
    if (p == held.end()) {
      store_.pool.acquire(whole[p]);
      held.slots.tail().push_back(whole[p]);
    } else {
      keep(h, {g, whole[p], p, (p + 1) * size});
    }
  }
  held.published = std::max(held.published, held.end());
}

// The state after the computed tokens, or the page that they leave half full.
void Publisher::keep_end(Holder& h, int32_t g) {
  const Rules& group = store_.groups[g];
  const bool is_tail = group.counts_tokens() && h.computed % group.page_tokens;
  if (!is_tail && group.kind != Kind::kState) return;
  for (int32_t part = 0; part < (is_tail ? 1 : group.slices); ++part) {
    const int32_t slot = store_.tree.page_at(path_.node, g, h.computed, part);
    if (slot == kNoPage) continue;
    keep(h, {g, slot, is_tail ? h.computed / group.page_tokens : part, h.computed});
  }
}

void Publisher::keep(Holder& h, const Source& source) {
  store_.pool.acquire(source.slot);
  h.sources.push_back(source);
}

}  // namespace kvell::memory
