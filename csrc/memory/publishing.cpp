#include "publishing.h"

#include <algorithm>

namespace kvell::memory {
namespace {

// Images of one age go in an order that has nothing to do with their place.
int64_t image_rank(const Holder& h, const Image& image) {
  constexpr int64_t kSpread = 0x9E3779B1, kRanks = int64_t(1) << 30;
  return h.prompt[image.start] * kSpread & (kRanks - 1);
}

constexpr int64_t kFetchAhead = 8;  // pages whose records are on their way while one is released

}  // namespace

void Publisher::advance(Holder& h, int64_t computed) {
  const int64_t before = h.computed, prompt = h.facts.prompt_tokens;
  h.computed = computed;
  if (computed > before) let_sources_go(h, true);
  publish(h);
  publish_embeddings(h);
  publish_states(h);
  leave_behind(h);
  if (before < prompt && prompt <= computed) drop(h);
}

void Publisher::give_back(Holder& h, bool renew, bool returns) {
  h.is_over = true;
  if (h.is_reservation) {
    for (const int32_t g : h.model->own)
      for (const int32_t slot : h.groups[g].slots) store_.pool.release(slot);
    return;
  }
  const bool is_new = h.computed > h.hit_tokens && !h.receiving;
  const bool has_ended = renew && !returns && h.claimed;
  if (has_ended && h.computed <= h.num_tokens() && store_.rule.learns()) {
    const Ending ending{h.root,      h.named,     h.prompt.data(), h.prompt.size(),
                        h.generated, h.computed, h.hint};
    store_.rule.table().access(ending, store_.step, h.runs);
  }
  if (renew && is_new && h.publishes) publish_end(h);
  let_sources_go(h, renew);
  for (const Checkpoint& checkpoint : h.checkpoints)
    for (const int32_t slot : checkpoint.slots) store_.pool.release(slot);
  resuming_.find(h);
  for (const int32_t g : h.model->own)
    release(h, g, int64_t(h.groups[g].slots.size()), renew ? end_rank(g) : kKeepKey);
  if (!renew || !h.publishes) return;
  const int64_t ended = store_.rule.ended_at(store_.step, resuming_.end_step(h));
  renew_points(h, resuming_.points(), ended);
  renew_points(h, resuming_.waypoints(), ended);
  if (is_new && h.computed <= h.num_tokens() && needs_an_end(*h.model))
    store_.usefulness.note_wasted(Sort::kTurnEnd, store_.usefulness.rank(Sort::kTurnEnd));
}

// Eviction rank of what only serves to go on where a request ended.
int64_t Publisher::end_rank(int32_t g) const {
  const Rules& group = store_.groups[g];
  const bool only_there = group.kind == Kind::kState || group.is_window();
  return only_there ? store_.usefulness.rank(Sort::kTurnEnd) : kNormal;
}

// A request resumes where its holder's hit ended: what sort of place is that?
void Publisher::note_used(const Holder& h) {
  bool has_states = false;
  for (const int32_t g : h.model->own) has_states |= store_.groups[g].kind == Kind::kState;
  for (const int32_t g : h.model->own) {
    const Rules& group = store_.groups[g];
    if (has_states ? group.kind != Kind::kState : !group.is_window()) continue;
    const Source* first = nullptr;
    for (const Source& source : h.sources)
      if (source.group == g && (!first || source.position < first->position)) first = &source;
    if (!first) continue;
    const Sort sort = Sort(store_.tree.tag_of(g, first->slot));
    if (sort == Sort::kBranch) continue;
    store_.usefulness.note_used(sort);
    store_.tree.retag(g, first->slot, int32_t(Sort::kBranch));
  }
}

// What one resumes from where the prompt ended or branched off is as young as the rest. Of
// windows only what has been left behind: the rest is in use.
void Publisher::renew_points(Holder& h, const std::vector<int64_t>& lengths, int64_t time) {
  h.renewed_step = store_.step;
  for (const int64_t length : lengths) {
    if (length > h.published) continue;
    for (const int32_t g : h.model->own) {
      const Rules& group = store_.groups[g];
      if (group.kind == Kind::kState)
        store_.tree.each_part(h.node, g, length, [&](int32_t slot) { renew(h, slot, length, time); });
      else if (group.is_window())
        renew_window(h, g, length, time);
    }
  }
}

void Publisher::renew_window(const Holder& h, int32_t g, int64_t length, int64_t time) {
  const Rules& group = store_.groups[g];
  const int64_t from = resumed_from(group, h.facts, length);
  const int64_t stop = std::min(length / group.page_tokens, h.groups[g].first);
  store_.tree.each_page(h.node, g, from, stop,
                        [&](int32_t slot, int64_t) { store_.pool.fetch(slot); });
  store_.tree.each_page(h.node, g, from, stop, [&](int32_t slot, int64_t position) {
    renew(h, slot, (position + 1) * group.page_tokens, time);
  });
}

void Publisher::renew(const Holder& h, int32_t slot, int64_t end, int64_t time) {
  store_.pool.renew(slot, key(h, slot, kNormal, time, end, end));
}

// The run that a token is in. Pages come in order: most often it is that of the one before.
const Run& Publisher::run_of(const Holder& h, int64_t token) const {
  const std::vector<Run>& runs = h.runs;
  const bool is_known = run_at_ < runs.size() && (!run_at_ || runs[run_at_ - 1].end < token) &&
                        (token <= runs[run_at_].end || run_at_ + 1 == runs.size());
  if (!is_known) {
    const auto found = std::lower_bound(runs.begin(), runs.end() - 1, token,
                                        [](const Run& run, int64_t at) { return run.end < at; });
    run_at_ = size_t(found - runs.begin());
  }
  return runs[run_at_];
}

// What an access of the holder makes of the page that ends the prefix of so many tokens. Unless
// a request has ended, others' pages keep their class; `own`: it accesses the page again.
Key Publisher::key(const Holder& h, int32_t slot, int64_t rank, int64_t time, int64_t length,
                   int64_t token, bool own) const {
  const EvictionRule& rule = store_.rule;
  if (!rule.learns() || rank != kNormal) return rule.key(rank, time, length);
  if (!h.runs.empty()) return rule.key(rank, time, length, run_of(h, token).eviction_class);
  const Key& old = store_.pool.key_of(slot);
  if (rank_of(old) == kNormal) return rule.key(rank, time, length, class_of(old));
  const int64_t output = std::max<int64_t>(0, h.expected_tokens - h.facts.prompt_tokens);
  const int32_t number = HazardTable::class_before(output, h.hint, own && !h.is_over);
  return rule.key(rank, time, length, number);
}

// ------------------------------------------------------------- named in the index

// Where the last whole page of tokens, or image, ends.
int64_t Publisher::whole_at(const Holder& h, int64_t computed) const {
  int64_t whole = 0;
  for (const int32_t size : h.model->page_sizes) whole = std::max(whole, computed / size * size);
  if (h.model->has_cross)
    for (const Image& image : h.facts.images)
      if (image.end() <= computed) whole = std::max(whole, image.end());
  return whole;
}

int64_t Publisher::published_at(const Holder& h, int64_t computed) const {
  if (!h.publishes) return 0;
  int64_t length = whole_at(h, computed);
  for (const Checkpoint& checkpoint : h.checkpoints)
    if (checkpoint.end <= computed) length = std::max(length, checkpoint.end);
  return length;
}

void Publisher::publish(Holder& h) {
  if (!h.publishes) return;
  const int64_t whole = whole_at(h, h.computed);
  const bool is_longer = whole > h.published;
  if (is_longer) extend(h, whole);
  publish_returned(h);
  if (!is_longer) return;
  for (const int32_t g : h.model->own) {
    if (store_.groups[g].kind == Kind::kCross)
      publish_images(h, g);
    else if (store_.groups[g].counts_tokens())
      publish_pages(h, g);
  }
  if (store_.step - h.renewed_step < h.model->renew_steps) return;
  resuming_.find(h);
  renew_points(h, resuming_.points(), store_.step);
}

// The tree knows the holder's tokens up to `length`.
void Publisher::extend(Holder& h, int64_t length) {
  const int32_t node = store_.tree.extend(h.node, tokens_between(h, h.published, length));
  store_.tree.hold(node);
  store_.tree.let_go(h.node);
  h.node = node;
  h.published = length;
}

void Publisher::publish_pages(Holder& h, int32_t g) {
  const int64_t count = h.computed / store_.groups[g].page_tokens;
  GroupPages& held = h.groups[g];
  name_pages(h, g, std::max(held.first, held.published), count);
  held.published = std::max(held.published, count);
}

// Whole pages of tokens from a position to another.
void Publisher::name_pages(const Holder& h, int32_t g, int64_t begin, int64_t end) {
  const int64_t size = store_.groups[g].page_tokens;
  const GroupPages& held = h.groups[g];
  for (int64_t p = begin; p < end;) {
    // Those that end in one node.
    const int64_t from = p;
    const int32_t node = store_.tree.at(h.node, (p + 1) * size);
    const int64_t stop = std::min(end, store_.tree.node(node).end() / size);
    p = std::max(stop, from + 1);
    store_.tree.put_run(node, g, from, held.slots.begin() + (from - held.first), p - from, [&](int64_t at) {
      const int32_t slot = held.slots[at - held.first];
      store_.pool.index(slot, store_.rule.key(kSpare, 0, (at + 1) * size));
      store_.changes.named(h.handle, g, slot, (at + 1) * size);
    });
  }
}

void Publisher::publish_images(Holder& h, int32_t g) {
  GroupPages& held = h.groups[g];
  int64_t position = 0;
  for (const Image& image : h.facts.images) {
    if (image.end() > h.computed) break;
    const int64_t begin = position, rank = image_rank(h, image);
    const int64_t end = begin + image_pages(store_.groups[g], image);
    for (position = std::max({begin, held.first, held.published}); position < end; ++position)
      name(h, g, image.end(), int32_t(position - begin), held.slots[position - held.first], rank);
    position = end;
  }
  held.published = std::max(held.published, position);
}

// Names embeddings by their images' content, all of an image's once it has begun.
void Publisher::publish_embeddings(Holder& h) {
  if (!h.publishes || h.images_root.empty()) return;
  for (const int32_t g : h.model->own) {
    if (store_.groups[g].kind != Kind::kVision) continue;
    GroupPages& held = h.groups[g];
    int64_t position = 0;
    for (const Image& image : h.facts.images) {
      if (image.start >= h.computed) break;
      const int64_t begin = position, rank = image_rank(h, image);
      const int64_t end = begin + image_pages(store_.groups[g], image);
      position = std::max({begin, held.first, held.published});
      if (position < end) {
        const int32_t root = store_.tree.root(h.images_root);
        const int64_t told = image.content_tokens();
        const int32_t node = store_.tree.extend(root, {h.prompt.data() + image.start, 0, told});
        for (; position < end; ++position) {
          const int32_t part = int32_t(position - begin), slot = held.slots[position - held.first];
          if (!store_.tree.put(node, g, told, part, slot, int32_t(Sort::kFine))) continue;
          store_.pool.index(slot, store_.rule.key(kSpare, 0, rank));
          store_.changes.named(h.handle, g, slot, told);
        }
      }
      position = end;
    }
    held.published = std::max(held.published, position);
  }
}

// `rank`: among pages of one age, the largest goes first.
void Publisher::name(Holder& h, int32_t g, int64_t end, int32_t part, int32_t slot, int64_t rank,
                     Sort sort) {
  if (!store_.tree.put(h.node, g, end, part, slot, int32_t(sort))) return;
  store_.pool.index(slot, store_.rule.key(kSpare, 0, rank));
  store_.changes.named(h.handle, g, slot, end);
}

// Names the states that the step has written, and uses them no longer.
void Publisher::publish_states(Holder& h) {
  for (const Checkpoint& checkpoint : h.checkpoints) {
    const int64_t end = checkpoint.end;
    if (end > h.computed) {
      for (const int32_t slot : checkpoint.slots) store_.pool.release(slot);
      continue;
    }
    if (end > h.published) extend(h, end);
    int32_t part = 0;
    const bool waits = checkpoint.sort == Sort::kWaypoint;
    const int64_t time = waits ? resuming_.end_step(h) : store_.step;
    for (const int32_t slot : checkpoint.slots) {
      name(h, checkpoint.group, end, part++, slot, end, checkpoint.sort);
      store_.pool.release(slot, key(h, slot, checkpoint.rank, time, end, end));
    }
    checkpoint_pages_[checkpoint.group] += part;
  }
  h.checkpoints.clear();
}

// Names what ends with the holder's last computed token: its state, pages not full.
void Publisher::publish_end(Holder& h) {
  const int64_t end = h.computed;
  if (end > h.num_tokens()) return;
  if (end > h.published) extend(h, end);
  for (const int32_t g : h.model->own) {
    const Rules& group = store_.groups[g];
    const GroupPages& held = h.groups[g];
    if (group.kind == Kind::kState) {
      for (size_t part = 0; part < held.slots.size(); ++part)
        name(h, g, end, int32_t(part), held.slots[part], end, Sort::kTurnEnd);
    } else if (group.counts_tokens() && end % group.page_tokens) {
      name(h, g, end, 0, held.slots[end / group.page_tokens - held.first], end, Sort::kTurnEnd);
    }
  }
}

Tokens Publisher::tokens_between(const Holder& h, int64_t begin, int64_t end) {
  const int64_t prompt = h.prompt.size();
  if (end <= prompt) return {h.prompt.data() + begin, begin, end - begin};
  if (begin >= prompt) return {h.generated.data() + (begin - prompt), begin, end - begin};
  tail_.assign(h.prompt.data() + begin, h.prompt.data() + prompt);
  tail_.insert(tail_.end(), h.generated.begin(), h.generated.begin() + (end - prompt));
  return {tail_.data(), begin, end - begin};
}

// -------------------------------------------------------- left behind, given back

void Publisher::leave_behind(Holder& h) {
  for (const int32_t g : h.model->own) {
    const Rules& group = store_.groups[g];
    GroupPages& held = h.groups[g];
    const int64_t start = kept_from(group, h.facts, h.computed);
    const int64_t count = std::min<int64_t>(start - held.first, held.slots.size());
    if (count <= 0) continue;
    resuming_.find(h);
    release(h, g, count, kSpare);
    held.slots.drop_front(size_t(count));
    held.first += count;
  }
}

// The prompt is computed: groups with a budget keep so much of it.
void Publisher::drop(Holder& h) {
  for (const int32_t g : h.model->own) {
    if (!dropped_tokens(store_.groups[g], h.facts)) continue;
    Slots& slots = h.groups[g].slots;
    const size_t keep = size_t(kept_to(store_.groups[g], h.facts, h.computed));
    for (size_t i = keep; i < slots.size(); ++i) store_.pool.release(slots[i]);
    if (keep < slots.size()) slots.keep_front(keep);
    h.groups[g].scanned_to = std::min(h.groups[g].scanned_to, h.groups[g].end());
  }
}

// Gives the first `count` pages back; `resuming_` has looked at the holder.
void Publisher::release(Holder& h, int32_t g, int64_t count, int64_t rank) {
  const Rules& group = store_.groups[g];
  const GroupPages& held = h.groups[g];
  if (group.kind == Kind::kCross || group.kind == Kind::kVision)
    return release_images(h, g, count, rank);
  const bool is_state = group.kind == Kind::kState;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kFetchAhead < count) store_.pool.fetch(held.slots[i + kFetchAhead]);
    const int64_t position = held.first + i;
    const int64_t length = is_state ? h.computed : (position + 1) * group.page_tokens;
    const bool goes_first = rank == kSpare && group.is_window();
    const auto kept_until = [&](int64_t step) {
      store_.pool.release(held.slots[i], key(h, held.slots[i], kNormal, step, length, length));
    };
    if (goes_first && resuming_.is_worth(h, g, position, resuming_.points()))
      kept_until(resuming_.end_step(h));
    else if (goes_first && resuming_.is_worth(h, g, position, resuming_.waypoints()))
      kept_until(resuming_.waypoint_step(h));
    else
      release_page(h, held.slots[i], rank, length, length);
  }
}

void Publisher::release_images(Holder& h, int32_t g, int64_t count, int64_t rank) {
  const GroupPages& held = h.groups[g];
  int64_t position = 0;
  for (const Image& image : h.facts.images) {
    const int64_t length = image_rank(h, image);
    const int64_t pages = image_pages(store_.groups[g], image);
    const int64_t end = std::min(position + pages, held.first + count);
    for (int64_t p = std::max(position, held.first); p < end; ++p)
      release_page(h, held.slots[p - held.first], rank, length, image.end());
    position += pages;
  }
}

void Publisher::release_page(const Holder& h, int32_t slot, int64_t rank, int64_t length,
                             int64_t token, bool own) {
  if (rank == kKeepKey)
    store_.pool.release(slot);
  else
    store_.pool.release(slot, key(h, slot, rank, store_.step, length, token, own));
}

// Copies of these pages are made, or will never be; `renew`: they were accessed.
void Publisher::let_sources_go(Holder& h, bool renew) {
  for (const Source& source : h.sources)
    release_page(h, source.slot, renew ? kNormal : kKeepKey, source.length, source.length, false);
  h.sources.clear();
}

}  // namespace kvell::memory
