#include "growth.h"

#include <numeric>

#include "foresight.h"

namespace kvell::memory {

bool Growth::missing(const Holder& h, int64_t until, int64_t* need) const {
  bool any = false;
  std::fill(need, need + store_.groups.size(), 0);
  for (const int32_t g : h.model->own) {
    const int64_t end = end_position(store_.groups[g], h.facts, until, h.computed);
    need[g] = std::max<int64_t>(0, end - h.groups[g].end()) +
              returning_pages(store_.groups[g], h.facts, h.groups[g].first);
    any |= need[g] > 0;
  }
  return any;
}

void Growth::begin() {
  wants_.clear();
  needs_.clear();
}

void Growth::want(int64_t index, Holder& h, int64_t until) {
  const size_t width = store_.groups.size(), row = wants_.size() * width;
  needs_.resize(row + width);
  if (missing(h, until, &needs_[row])) wants_.push_back({index, &h});
}

int64_t Growth::serve(int64_t calls, PageRows& rows, CopyRows& copies) {
  if (wants_.empty()) return calls;
  const size_t width = store_.groups.size();
  const int64_t served = longest_feasible(calls);
  left_.assign(width, 0);
  size_t count = 0;
  for (; count < wants_.size() && wants_[count].index < served; ++count)
    for (size_t g = 0; g < width; ++g) left_[g] += needs_[count * width + g];
  rows.reserve(size_t(std::accumulate(left_.begin(), left_.end(), int64_t(0))));
  for (size_t i = 0; i < count; ++i) place(wants_[i], &needs_[i * width], rows, copies);
  return served;
}

int64_t Growth::longest_feasible(int64_t calls) {
  const size_t width = store_.groups.size();
  left_.assign(width, 0);
  for (size_t i = 0; i < wants_.size(); ++i) {
    for (size_t g = 0; g < width; ++g) left_[g] += needs_[i * width + g];
    if (!store_.pool.supply().feasible(left_)) return wants_[i].index;
  }
  return calls;
}

void Growth::place(const Want& want, const int64_t* need, PageRows& rows, CopyRows& copies) {
  Holder& h = *want.holder;
  h.prompt.keep();
  for (const int32_t g : h.model->own) {
    if (!need[g]) continue;
    GroupPages& held = h.groups[g];
    const int64_t begin = held.end();
    const int64_t before = returning_pages(store_.groups[g], h.facts, held.first);
    const int64_t demand =
        demand_pages(store_.groups[g], h.facts, h.expected_tokens, begin - before, need[g]);
    const size_t known = held.slots.size();
    store_.placer.place(h.handle, g, need[g], demand, left_, held.slots.tail());
    if (before) held.bring_home(known, before);
    const auto tell = [&](int64_t from, int64_t end) {
      for (int64_t p = from; p < end; ++p)
        rows.push_back({int32_t(want.index), g, int32_t(p),
                        store_.pool.page_of(g, held.slots[size_t(p - held.first)])});
    };
    tell(held.first, held.first + before);
    tell(begin, held.end());
    if (!h.sources.empty()) note_copies(h, g, begin, copies);
  }
  foresee(store_.groups, h);
}

// New pages from position `begin` on that are to begin as copies.
void Growth::note_copies(const Holder& h, int32_t g, int64_t begin, CopyRows& copies) const {
  const GroupPages& held = h.groups[g];
  for (const Source& source : h.sources) {
    if (source.group != g || source.position < begin || source.position >= held.end()) continue;
    const int32_t target = held.slots[source.position - held.first];
    copies.push_back({h.handle, g, store_.pool.page_of(g, source.slot),
                      store_.pool.page_of(g, target)});
  }
}

int64_t Growth::largest(const Holder& h, int64_t until) const {
  if (h.drops && h.computed < h.facts.prompt_tokens)
    until = std::min(until, h.facts.prompt_tokens);
  int64_t low = h.computed, high = until;
  Counts need(store_.groups.size());
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    missing(h, middle, need.data());
    if (store_.pool.supply().feasible(need))
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

void Growth::add_peak(const Holder& h, int64_t until, int64_t chunk, Counts& need) const {
  // Once it has left the place where it resumed, what it holds begins where a step needs it to.
  if (h.computed > h.hit_tokens && h.has_room(until)) return;
  for (const int32_t g : h.model->own) {
    const int64_t peak = peak_pages(store_.groups[g], h.facts, until, chunk, h.computed);
    need[g] += std::max<int64_t>(0, peak - int64_t(h.groups[g].slots.size()));
  }
}

}  // namespace kvell::memory
