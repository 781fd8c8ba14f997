#include "core.h"

#include <stdexcept>

namespace kvell::memory {
namespace {

int64_t smallest_page(const Groups& groups) {
  int64_t least = groups.at(0).page_tokens;
  for (const Rules& group : groups) least = std::min<int64_t>(least, group.page_tokens);
  return least;
}

void same_size(Ints left, Ints right) {
  if (left.size != right.size) throw std::invalid_argument("arrays of different lengths");
}

}  // namespace

Core::Core(Groups groups, int32_t num_large, const Sharing& sharing)
    : groups_(std::move(groups)),
      publish_tokens_(smallest_page(groups_)),
      pool_(groups_, num_large, sharing.quotas),
      tree_(groups_, pool_),
      placer_(groups_, pool_, tree_, sharing.literal_order),
      group_hit_tokens_(groups_.size(), 0) {}

Holder& Core::holder(int32_t handle) const {
  const auto found = holders_.find(handle);
  if (found == holders_.end()) throw UnknownHandle{handle};
  return *found->second;
}

std::vector<const Holder*> Core::holders() const {
  std::vector<const Holder*> all;
  for (const auto& item : holders_) all.push_back(item.second.get());
  std::sort(all.begin(), all.end(),
            [](const Holder* a, const Holder* b) { return a->handle < b->handle; });
  return all;
}

// ---------------------------------------------------------------------- prefixes

void Core::begin_step(int64_t step) {
  if (step < step_)
    throw std::invalid_argument("steps only grow: " + std::to_string(step) + " after " +
                                std::to_string(step_));
  step_ = step;
  for (auto lease = leases_.begin(); lease != leases_.end();) {
    const auto here = lease++;
    if (here->second < step) close(here->first, false);
  }
}

int64_t Core::match(Ints tokens, const std::string& root) {
  tree_.match(root, {tokens.data, 0, tokens.size}, path_);
  return longest_hit(groups_, path_, std::min(path_.length, tokens.size - 1), runs_);
}

int64_t Core::peek(Ints tokens, const std::string& root) { return match(tokens, root); }

int32_t Core::open(Ints tokens, const std::string& root, std::optional<int64_t> lease_until,
                   bool reuse) {
  auto made = std::make_unique<Holder>();
  Holder& h = *made;
  if (!reuse) placer_.evict_unused();
  const int64_t found = match(tokens, root), length = reuse ? found : 0;
  h.node = tree_.at(path_.node ? path_.node : tree_.root(root), length);
  tree_.hold(h.node);
  h.groups.resize(groups_.size());
  for (size_t g = 0; g < groups_.size(); ++g) {
    GroupPages& held = h.groups[g];
    held.first = groups_[g].first_hit_page(length);
    const int64_t end = std::max(held.first, length / groups_[g].page_tokens);
    held.slots.assign(path_.found[g].begin() + std::min<int64_t>(held.first, path_.found[g].size()),
                      path_.found[g].begin() + std::min<int64_t>(end, path_.found[g].size()));
    for (const int32_t slot : held.slots) pool_.acquire(slot);
  }
  h.handle = next_handle_++;
  h.hit_tokens = h.computed = h.published = length;
  h.expected_tokens = tokens.size;
  h.prompt.assign(tokens.data, tokens.data + tokens.size);
  h.lease_until = lease_until;
  if (lease_until) leases_[h.handle] = *lease_until;
  pool_.open_holder(h.handle);
  foresee(h);
  const int32_t handle = h.handle;
  holders_.emplace(handle, std::move(made));
  return handle;
}

void Core::claim(int32_t handle, int64_t expected_tokens) {
  Holder& h = holder(handle);
  h.lease_until.reset();
  leases_.erase(handle);
  h.expected_tokens = expected_tokens;
  total_hit_tokens_ += h.hit_tokens;
  for (size_t g = 0; g < groups_.size(); ++g) {
    const Rules& group = groups_[g];
    const int64_t first = group.first_hit_page(h.hit_tokens) * group.page_tokens;
    group_hit_tokens_[g] += std::max<int64_t>(0, h.hit_tokens - first);
  }
}

// ------------------------------------------------------------------------ growth

// Pages still wanted for `until` tokens, per group; false if none.
bool Core::missing(const Holder& h, int64_t until, int64_t* need) const {
  bool any = false;
  for (size_t g = 0; g < groups_.size(); ++g) {
    need[g] = std::max<int64_t>(0, ceil_div(until, groups_[g].page_tokens) - h.groups[g].end());
    any |= need[g] > 0;
  }
  return any;
}

int64_t Core::grow(Ints handles, Ints until, std::vector<Row>& rows) {
  same_size(handles, until);
  const size_t width = groups_.size();
  wants_.clear();
  needs_.clear();
  for (int64_t i = 0; i < handles.size; ++i) {
    Holder& h = holder(handles[i]);
    if (until[i] <= h.room_tokens) continue;
    needs_.resize((wants_.size() + 1) * width);
    missing(h, until[i], &needs_[wants_.size() * width]);
    wants_.push_back({i, &h});
  }
  if (wants_.empty()) return handles.size;
  const int64_t served = longest_feasible(handles.size);
  Counts left(width, 0);
  size_t count = 0;
  for (; count < wants_.size() && wants_[count].index < served; ++count)
    for (size_t g = 0; g < width; ++g) left[g] += needs_[count * width + g];
  for (size_t i = 0; i < count; ++i) place(wants_[i], &needs_[i * width], left, rows);
  return served;
}

int64_t Core::longest_feasible(int64_t calls) {
  const size_t width = groups_.size();
  Counts total(width, 0);
  for (size_t i = 0; i < wants_.size(); ++i) {
    for (size_t g = 0; g < width; ++g) total[g] += needs_[i * width + g];
    if (!pool_.feasible(total)) return wants_[i].index;
  }
  return calls;
}

void Core::place(const Want& want, const int64_t* need, Counts& left, std::vector<Row>& rows) {
  Holder& h = *want.holder;
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (!need[g]) continue;
    GroupPages& held = h.groups[g];
    const int64_t begin = held.end();
    const int64_t demand = groups_[g].demand_pages(h.expected_tokens, begin, need[g]);
    placer_.place(h.handle, int32_t(g), need[g], demand, left, held.slots);
    for (int64_t position = begin; position < held.end(); ++position)
      rows.push_back({int32_t(want.index), int32_t(g), int32_t(position),
                      pool_.page_of(int32_t(g), held.slots[position - held.first])});
  }
  foresee(h);
}

int64_t Core::largest(int32_t handle, int64_t until) {
  const Holder& h = holder(handle);
  int64_t low = h.computed, high = until;
  Counts need(groups_.size());
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    missing(h, middle, need.data());
    if (pool_.feasible(need))
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

void Core::held_pages(int32_t handle, std::vector<Row>& rows) const {
  const Holder& h = holder(handle);
  for (size_t g = 0; g < groups_.size(); ++g) {
    const GroupPages& held = h.groups[g];
    for (size_t i = 0; i < held.slots.size(); ++i)
      rows.push_back({0, int32_t(g), int32_t(held.first + int64_t(i)),
                      pool_.page_of(int32_t(g), held.slots[i])});
  }
}

// Pages the holder will need beyond those it holds, at its worst step up to `until`.
void Core::add_peak(const Holder& h, int64_t until, int64_t chunk, Counts& need) const {
  for (size_t g = 0; g < groups_.size(); ++g) {
    const int64_t held = int64_t(h.groups[g].slots.size());
    need[g] += std::max<int64_t>(0, groups_[g].peak_pages(until, chunk, h.computed) - held);
  }
}

bool Core::fits(int32_t handle, int64_t until, int64_t chunk_tokens, Ints others,
                Ints others_until) {
  same_size(others, others_until);
  Counts need(groups_.size(), 0);
  add_peak(holder(handle), until, chunk_tokens, need);
  for (int64_t i = 0; i < others.size; ++i) add_peak(holder(others[i]), others_until[i], 1, need);
  return pool_.feasible(need);
}

// ---------------------------------------------------------------------- progress

void Core::append(Ints handles, Ints tokens) {
  same_size(handles, tokens);
  called_.clear();
  for (int64_t i = 0; i < handles.size; ++i) called_.push_back(&holder(handles[i]));
  for (int64_t i = 0; i < handles.size; ++i) called_[i]->generated.push_back(tokens[i]);
}

void Core::advance(Ints handles, Ints computed) {
  same_size(handles, computed);
  called_.clear();
  for (int64_t i = 0; i < handles.size; ++i) {
    called_.push_back(&holder(handles[i]));
    check_advance(*called_.back(), computed[i]);
  }
  for (int64_t i = 0; i < handles.size; ++i) {
    Holder& h = *called_[i];
    h.computed = computed[i];
    if (h.computed < h.next_event) continue;
    publish(h);
    leave_behind(h);
    foresee(h);
  }
}

// A caller's slip must not reach the tables.
void Core::check_advance(const Holder& h, int64_t computed) const {
  if (computed > h.room_tokens)
    throw std::invalid_argument("tokens computed beyond the pages held by handle " +
                                std::to_string(h.handle));
  if (computed / publish_tokens_ * publish_tokens_ > h.num_tokens())
    throw std::invalid_argument("tokens computed beyond those known of handle " +
                                std::to_string(h.handle));
}

void Core::publish(Holder& h) {
  const int64_t length = h.computed / publish_tokens_ * publish_tokens_;
  if (length <= h.published) return;
  const int32_t node = tree_.extend(h.node, tokens_between(h, h.published, length));
  tree_.hold(node);
  tree_.let_go(h.node);
  h.node = node;
  for (size_t g = 0; g < groups_.size(); ++g) {
    const int64_t size = groups_[g].page_tokens, end = length / size;
    const GroupPages& held = h.groups[g];
    for (int64_t p = std::max(held.first, h.published / size); p < end; ++p) {
      const int32_t slot = held.slots[p - held.first];
      if (!tree_.put(node, int32_t(g), p, slot)) continue;
      const int64_t prefix = groups_[g].prefix_length((p + 1) * size);
      pool_.index(slot, rule_.key(kBehindWindow, 0, prefix));
    }
  }
  h.published = length;
}

Tokens Core::tokens_between(const Holder& h, int64_t begin, int64_t end) {
  const int64_t prompt = int64_t(h.prompt.size());
  if (end <= prompt) return {h.prompt.data() + begin, begin, end - begin};
  if (begin >= prompt) return {h.generated.data() + (begin - prompt), begin, end - begin};
  tail_.assign(h.prompt.begin() + begin, h.prompt.end());
  tail_.insert(tail_.end(), h.generated.begin(), h.generated.begin() + (end - prompt));
  return {tail_.data(), begin, end - begin};
}

void Core::leave_behind(Holder& h) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    const Rules& group = groups_[g];
    GroupPages& held = h.groups[g];
    const int64_t start = group.active_start(h.computed) / group.page_tokens;
    const int64_t count = std::min<int64_t>(start - held.first, held.slots.size());
    if (count <= 0) continue;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t end = (held.first + i + 1) * group.page_tokens;
      pool_.release(held.slots[i], rule_.key(kBehindWindow, step_, group.prefix_length(end)));
    }
    held.slots.erase(held.slots.begin(), held.slots.begin() + count);
    held.first += count;
  }
}

// When the holder has to be looked at again.
void Core::foresee(Holder& h) const {
  h.room_tokens = std::numeric_limits<int64_t>::max();
  h.next_event = h.published + publish_tokens_;
  for (size_t g = 0; g < groups_.size(); ++g) {
    h.room_tokens = std::min(h.room_tokens, h.groups[g].end() * groups_[g].page_tokens);
    h.next_event = std::min(h.next_event, groups_[g].behind_at(h.groups[g].first));
  }
}

void Core::close(int32_t handle, bool renew) {
  const auto found = holders_.find(handle);
  if (found == holders_.end()) throw UnknownHandle{handle};
  const std::unique_ptr<Holder> gone = std::move(found->second);
  holders_.erase(found);
  leases_.erase(handle);
  for (size_t g = 0; g < groups_.size(); ++g) {
    int64_t end = gone->groups[g].first * groups_[g].page_tokens;
    for (const int32_t slot : gone->groups[g].slots) {
      end += groups_[g].page_tokens;
      if (renew)
        pool_.release(slot, rule_.key(kNormal, step_, groups_[g].prefix_length(end)));
      else
        pool_.release(slot);
    }
  }
  pool_.close_holder(handle);
  tree_.let_go(gone->node);
}

}  // namespace kvell::memory
