#include "core.h"

#include <algorithm>
#include <stdexcept>

namespace kvell::memory {
namespace {

// Of holders without a text; nothing is ever named under it (tests/oracle/core/reserving.py).
const std::string kReservedRoot("\0reserved", 9);

void same_size(Ints left, Ints right) {
  if (left.size != right.size) throw std::invalid_argument("arrays of different lengths");
}

std::string root_of(const Prompt& prompt) { return prompt.model + "/" + prompt.root; }

}  // namespace

Core::Core(Groups groups, const std::vector<std::string>& names, int32_t num_large,
           const Sharing& sharing, const HazardSettings& learning)
    : store_(std::move(groups), num_large, sharing, learning),
      models_(store_.groups, names),
      publisher_(store_),
      compactor_(store_),
      lookup_(store_),
      growth_(store_),
      withholder_(store_),
      group_hit_tokens_(store_.groups.size(), 0) {}

void Core::add_groups(const Groups& groups, const std::vector<std::string>& names) {
  store_.pool.check_size(groups);
  const size_t first = store_.groups.size(), width = first + groups.size();
  store_.groups.insert(store_.groups.end(), groups.begin(), groups.end());
  models_.add(first, names);
  turned_away_ = {};
  if (store_.pool.add_groups()) rename_slots();
  store_.placer.add_groups();
  publisher_.add_groups();
  group_hit_tokens_.resize(width, 0);
  for (const auto& item : by_handle_) item.second->groups.resize(width);
}

void Core::rename_slots() {
  const auto rename = [this](int32_t slot) { return store_.pool.renamed(slot); };
  store_.tree.rename(rename);
  for (const auto& item : by_handle_) {
    Holder& h = *item.second;
    for (GroupPages& held : h.groups)
      for (size_t i = 0; i < held.slots.size(); ++i) held.slots[i] = rename(held.slots[i]);
    for (Source& source : h.sources) source.slot = rename(source.slot);
    for (Checkpoint& checkpoint : h.checkpoints)
      for (int32_t& slot : checkpoint.slots) slot = rename(slot);
  }
}

Holder& Core::holder(int32_t handle) const {
  const std::unique_ptr<Holder>* found = holders_.find(handle);
  if (!found) throw UnknownHandle{handle};
  return **found;
}

// Looks all handles up before anything changes.
void Core::call(Ints handles) {
  called_.clear();
  for (int64_t i = 0; i < handles.size; ++i) called_.push_back(&holder(handles[i]));
}

std::vector<const Holder*> Core::holders() const {
  std::vector<const Holder*> all;
  for (const auto& item : by_handle_) all.push_back(item.second);
  return all;
}

// ---------------------------------------------------------------------- prefixes

void Core::begin_step(int64_t step) {
  if (step < store_.step)
    throw std::invalid_argument("steps only grow: " + std::to_string(step) + " after " +
                                std::to_string(store_.step));
  store_.step = step;
  store_.rule.set_time(step);
  for (auto lease = leases_.begin(); lease != leases_.end();) {
    const auto here = lease++;
    if (here->second < step) close(here->first, false);
  }
}

int64_t Core::peek(const Prompt& prompt) {
  const Facts facts = facts_of(prompt.tokens.size, prompt.prompt_tokens, prompt.images);
  return lookup_.match(prompt.tokens, root_of(prompt), models_.at(prompt.model), facts);
}

std::vector<int64_t> Core::reach(const Prompt& prompt) {
  const Facts facts = facts_of(prompt.tokens.size, prompt.prompt_tokens, prompt.images);
  const Model& model = models_.at(prompt.model);
  return lookup_.reach(prompt.tokens, root_of(prompt), model, facts);
}

int32_t Core::open(const Prompt& prompt, std::optional<int64_t> lease_until, bool reuse) {
  auto made = std::make_unique<Holder>();
  Holder& h = *made;
  const Ints tokens = prompt.tokens;
  h.facts = facts_of(tokens.size, prompt.prompt_tokens, prompt.images);
  h.model = &models_.at(prompt.model);
  if (!reuse) store_.placer.evict_unused();
  const std::string root = root_of(prompt);
  if (h.model->has_embeddings && !h.facts.images.empty()) h.images_root = images_root(root);
  const int64_t found = lookup_.match(tokens, root, *h.model, h.facts);
  const int64_t length = reuse ? found : 0, known = lookup_.path().length;
  const int32_t last = lookup_.path().node;
  h.node = store_.tree.at(last ? last : store_.tree.root(root), length);
  store_.tree.hold(h.node);
  h.groups.resize(store_.groups.size());
  h.drops = false;
  for (const int32_t g : h.model->own) {
    h.drops |= dropped_tokens(store_.groups[g], h.facts) > 0;
    lookup_.resume(h, g, length, prompt.tokens);
  }
  h.root = root;
  h.publishes = !h.drops && !(h.model->counts_images && !h.facts.images.empty());
  h.handle = next_handle_++;
  h.hit_tokens = h.computed = h.published = length;
  h.matched_tokens = reuse ? std::min(known, tokens.size - 1) : 0;
  h.expected_tokens = tokens.size;
  h.prompt.open(tokens, lease_until ? nullptr : prompt.owner);
  h.lease_until = lease_until;
  h.renewed_step = store_.step;
  h.next_cut = h.publishes && h.model->has_states ? 0 : kNever;
  if (lease_until) leases_[h.handle] = *lease_until;
  if (!lease_until) watch(h);
  store_.pool.rooms().open_holder(h.handle);
  foresee(store_.groups, h);
  const int32_t handle = h.handle;
  by_handle_.emplace_hint(by_handle_.end(), handle, made.get());
  holders_.insert(handle, std::move(made));
  return handle;
}

// It may be turned away; images may be shared with prompts that begin otherwise.
void Core::watch(const Holder& h) {
  turned_away_ = {h.facts.images.empty() ? h.handle : 0};
  store_.tree.watch(lookup_.path().node, lookup_.path().length, *h.model);
}

void Core::claim(int32_t handle, int64_t expected_tokens, Hint hint) {
  Holder& h = holder(handle);
  if (h.is_reservation)
    throw std::invalid_argument("handle " + std::to_string(handle) + " has no text to compute");
  h.hint = hint;
  if (handle == turned_away_.handle) turned_away_ = {};
  h.claimed = true;
  h.prompt.keep();
  if (store_.rule.learns())
    h.named = store_.rule.table().names(h.root, h.prompt.data(), h.prompt.size());
  h.lease_until.reset();
  leases_.erase(handle);
  h.expected_tokens = expected_tokens;
  total_hit_tokens_ += h.hit_tokens;
  store_.placer.hits().note(h.hit_tokens, h.prompt.size());
  publisher_.note_used(h);
  for (const int32_t g : h.model->own) {
    const Rules& group = store_.groups[g];
    if (!group.counts_tokens() || !group.required_for_hit) continue;
    const int64_t first = h.groups[g].first * group.page_tokens;
    group_hit_tokens_[g] += std::max<int64_t>(0, h.hit_tokens - first);
  }
}

void Core::receive(int32_t handle, int64_t computed) {
  Holder& h = holder(handle);
  // The last token of a request has still to be computed.
  const int64_t most = h.num_tokens() - (h.lease_until ? 0 : 1);
  if (computed < h.hit_tokens || computed > most)
    throw std::invalid_argument(std::to_string(computed) + " tokens cannot follow " +
                                std::to_string(h.hit_tokens));
  if (h.is_reservation || publisher_.cannot_receive(h, computed))
    throw std::invalid_argument("handle " + std::to_string(handle) +
                                " cannot receive what it computes");
  turned_away_ = {};
  publisher_.receive(h, computed);
  foresee(store_.groups, h);
}

void Core::sources(int32_t handle, PageRows& rows) const {
  for (const Source& source : holder(handle).sources)
    rows.push_back({source.group, int32_t(source.position),
                    store_.pool.page_of(source.group, source.slot), int32_t(source.length)});
  std::sort(rows.begin(), rows.end());
}

// -------------------------------------------------------- pages without a text

int32_t Core::reserve(Ints counts, int64_t lease_until, const std::string& model) {
  const Model& own = models_.at(model);
  const size_t width = store_.groups.size();
  if (size_t(counts.size) != width)
    throw std::invalid_argument("one number of pages is needed for each group");
  Counts need(width);
  for (size_t g = 0; g < width; ++g) {
    need[g] = counts[g];
    if (need[g] < 0) throw std::invalid_argument("one number of pages is needed for each group");
    if (need[g] && std::find(own.own.begin(), own.own.end(), int32_t(g)) == own.own.end())
      throw std::invalid_argument("pages of a group that is not of model '" + model +
                                  "' cannot be reserved");
  }
  if (!store_.pool.supply().feasible(need)) return 0;
  auto made = std::make_unique<Holder>();
  Holder& h = *made;
  h.is_reservation = true;
  h.drops = h.publishes = false;
  h.facts = facts_of(0, std::nullopt, {nullptr, 0});
  h.model = &own;
  h.root = model;  // until it has a text
  h.node = store_.tree.root(model + "/" + kReservedRoot);
  store_.tree.hold(h.node);
  h.groups.resize(width);
  h.hit_tokens = h.computed = h.published = h.matched_tokens = h.expected_tokens = 0;
  h.handle = next_handle_++;
  h.prompt.open({nullptr, 0}, nullptr);
  h.lease_until = leases_[h.handle] = lease_until;
  h.renewed_step = store_.step;
  h.next_cut = kNever;
  store_.pool.rooms().open_holder(h.handle);
  Counts left = need;
  for (const int32_t g : own.own)
    store_.placer.place(h.handle, g, need[g], need[g], left, h.groups[g].slots.tail());
  foresee(store_.groups, h);
  const int32_t handle = h.handle;
  by_handle_.emplace_hint(by_handle_.end(), handle, made.get());
  holders_.insert(handle, std::move(made));
  return handle;
}

void Core::adopt(int32_t handle, Ints tokens, const std::string& root,
                 std::optional<int64_t> prompt_tokens) {
  Holder& h = holder(handle);
  const int64_t computed = tokens.size;
  const Facts facts = facts_of(computed, prompt_tokens, {nullptr, 0});
  for (const int32_t g : h.model->own) {
    const Rules& group = store_.groups[g];
    const int64_t needed =
        end_position(group, facts, computed, computed) - resumed_from(group, facts, computed);
    if (dropped_tokens(group, facts) || int64_t(h.groups[g].slots.size()) != needed)
      throw std::invalid_argument("the pages of handle " + std::to_string(handle) +
                                  " are not those of this text");
  }
  if (!h.is_reservation || !computed)
    throw std::invalid_argument("handle " + std::to_string(handle) +
                                " is not a reservation, or there is no text");
  h.is_reservation = false;
  h.receiving = h.publishes = true;
  h.prompt.open(tokens, nullptr);
  h.facts = facts;
  const std::string full = h.root + "/" + root;
  h.computed = h.expected_tokens = computed;
  for (const int32_t g : h.model->own)
    h.groups[g].first = resumed_from(store_.groups[g], facts, computed);
  const int32_t old = std::exchange(h.node, store_.tree.root(full));
  store_.tree.hold(h.node);
  store_.tree.let_go(old);
  h.root = full;
  foresee(store_.groups, h);
}

int64_t Core::erase(Ints tokens, const std::string& root, const std::string& model) {
  models_.at(model);
  const std::string full = model + "/" + root;
  int64_t evicted = 0;
  for (int64_t length = tokens.size; length;) {
    const int32_t id = store_.tree.find(full, {tokens.data, 0, length});
    if (id == kNoNode) break;
    const Node& node = store_.tree.node(id);
    if (node.end() != length || !node.children.empty() || node.holders) break;
    length = node.start;
    evicted += evict_node(id);
  }
  return evicted;
}

// Evicts a node's pages that nobody uses.
int64_t Core::evict_node(int32_t id) {
  const Node& node = store_.tree.node(id);
  std::vector<std::pair<int32_t, int32_t>> going;  // group, slot
  for (size_t g = 0; g < node.pages.size(); ++g)
    for (const int32_t slot : node.pages[g])
      if (slot != kNoPage) going.push_back({int32_t(g), slot});
  for (const Mark& mark : node.marks)
    for (const int32_t slot : mark.slots)
      if (slot != kNoPage) going.push_back({mark.group, slot});
  going.erase(std::remove_if(going.begin(), going.end(),
                             [this](const auto& one) { return !store_.pool.page(one.second).cached(); }),
              going.end());
  std::sort(going.begin(), going.end());
  for (const auto& [group, slot] : going) store_.placer.evict_cached(group, slot);
  return int64_t(going.size());
}

// ------------------------------------------------------------------------ growth

int64_t Core::grow(Ints handles, Ints until, PageRows& rows) {
  same_size(handles, until);
  growth_.begin();
  for (int64_t i = 0; i < handles.size; ++i) {
    Holder& h = holder(handles[i]);
    if (!h.has_room(until[i])) growth_.want(i, h, until[i]);
  }
  return growth_.serve(handles.size, rows, copies_);
}

void Core::held_pages(int32_t handle, PageRows& rows) const {
  const Holder& h = holder(handle);
  for (size_t g = 0; g < h.groups.size(); ++g) {
    const GroupPages& held = h.groups[g];
    for (size_t i = 0; i < held.slots.size(); ++i)
      rows.push_back({0, int32_t(g), int32_t(held.first + int64_t(i)),
                      store_.pool.page_of(int32_t(g), held.slots[i])});
  }
}

bool Core::fits(int32_t handle, int64_t until, int64_t chunk_tokens, Ints others,
                Ints others_until) {
  same_size(others, others_until);
  Counts need(store_.groups.size(), 0);
  growth_.add_peak(holder(handle), until, chunk_tokens, need);
  for (int64_t i = 0; i < others.size; ++i)
    growth_.add_peak(holder(others[i]), others_until[i], 1, need);
  const bool fits = store_.pool.supply().feasible(need);
  if (handle == turned_away_.handle && !store_.pool.supply().has_shares())
    turned_away_.short_large = std::max<int64_t>(0, store_.pool.supply().shortage(need));
  return fits;
}

// Why this is certain: what the others hold and still need never becomes less but by pages
// that are freed, holders that are closed, and those moved on from where they resumed; and what
// the request itself needs is the same while nothing happens on its path.
bool Core::may_fit() const {
  const int64_t freed = store_.pool.freed() - turned_away_.freed;
  return turned_away_.freed < 0 || freed >= turned_away_.short_large || store_.tree.touched();
}

// ------------------------------------------------------------------- checkpoints

void Core::checkpoint(Ints handles, Ints until, StateRows& rows) {
  same_size(handles, until);
  call(handles);
  for (int64_t i = 0; i < handles.size; ++i) {
    Holder& h = *called_[i];
    if (until[i] < h.next_cut) continue;
    cuts_of(h, until[i], cuts_);
    h.next_cut = next_cut_of(h);
    for (const int32_t g : h.model->own)
      if (store_.groups[g].kind == Kind::kState) keep_states(h, g, i, rows);
  }
}

// Reserves pages for the states worth keeping, the most valuable first.
void Core::keep_states(Holder& h, int32_t g, int64_t index, StateRows& rows) {
  const Rules& group = store_.groups[g];
  std::stable_sort(cuts_.begin(), cuts_.end(), [this](const Cut& a, const Cut& b) {
    return store_.usefulness.rank(a.sort) > store_.usefulness.rank(b.sort);
  });
  for (const Cut& cut : cuts_) {
    const bool is_worth = cut.end - h.hit_tokens >= group.worth_tokens;
    const int64_t asked = store_.usefulness.rank(cut.sort);
    const int64_t rank = is_worth ? asked : std::min(asked, kCoarse);
    std::vector<int32_t> slots =
        store_.placer.keep(g, group.slices, rank, store_.rule.limit(rank));
    if (slots.empty()) continue;
    for (int32_t part = 0; part < group.slices; ++part)
      rows.push_back({int32_t(index), g, int32_t(cut.end), part,
                      store_.pool.page_of(g, slots[part])});
    h.checkpoints.push_back({g, cut.end, cut.sort, rank, std::move(slots)});
    h.next_event = 0;
  }
}

void Core::compact(int64_t most_large, PageRows& rows) {
  for (const Move& move : compactor_.compact(by_handle_, most_large)) {
    const int32_t handle = move.holder->handle, g = move.group;
    const int32_t page = store_.pool.page_of(g, move.new_slot);
    rows.push_back({handle, g, int32_t(move.position), page});
    copies_.push_back({handle, g, store_.pool.page_of(g, move.old_slot), page});
  }
}

// ---------------------------------------------------------------------- progress

void Core::append(Ints handles, Ints tokens) {
  same_size(handles, tokens);
  call(handles);
  for (int64_t i = 0; i < handles.size; ++i) called_[i]->generated.push_back(tokens[i]);
}

void Core::advance(Ints handles, Ints computed) {
  same_size(handles, computed);
  call(handles);
  for (int64_t i = 0; i < handles.size; ++i) {
    const Holder& h = *called_[i];
    const bool is_plain = computed[i] < h.next_event && computed[i] <= h.room.to;
    if (!is_plain || computed[i] < h.computed || h.receiving) check_advance(h, computed[i]);
  }
  for (int64_t i = 0; i < handles.size; ++i) {
    Holder& h = *called_[i];
    if (h.computed == h.hit_tokens || h.drops || h.receiving) turned_away_ = {};
    const bool arrives = std::exchange(h.receiving, false);
    if (!arrives && computed[i] < h.next_event && computed[i] >= h.computed) {
      h.computed = computed[i];
      continue;
    }
    h.prompt.keep();
    publisher_.advance(h, computed[i]);
    foresee(store_.groups, h);
  }
}

// A caller's slip must not reach the tables.
void Core::check_advance(const Holder& h, int64_t computed) {
  if (computed < h.facts.away_tokens)
    throw std::invalid_argument("fewer tokens computed than those of handle " +
                                std::to_string(h.handle) + " that are remote");
  needs_.resize(store_.groups.size());
  if ((computed > h.computed || h.receiving) && growth_.missing(h, computed, needs_.data()))
    throw std::invalid_argument("tokens computed beyond the pages held by handle " +
                                std::to_string(h.handle));
  if (publisher_.published_at(h, computed) > h.num_tokens())
    throw std::invalid_argument("tokens computed beyond those known of handle " +
                                std::to_string(h.handle));
}

void Core::close(int32_t handle, bool renew, bool returns) {
  std::unique_ptr<Holder>* found = holders_.find(handle);
  if (!found) throw UnknownHandle{handle};
  const std::unique_ptr<Holder> gone = std::move(*found);
  holders_.erase(handle);
  by_handle_.erase(handle);
  leases_.erase(handle);
  publisher_.give_back(*gone, renew, returns);
  if (handle != turned_away_.handle || !turned_away_.short_large || turned_away_.freed >= 0)
    turned_away_ = {};
  else
    turned_away_.freed = store_.pool.freed();
  store_.pool.rooms().close_holder(handle);
  store_.tree.let_go(gone->node);
  // How often one was turned away shows in no plan.
  if (handle == next_handle_ - 1 && !gone->claimed && !gone->lease_until) --next_handle_;
}

void Core::learn(std::vector<double> index, double fading, int64_t next_refit) {
  store_.rule.table().learn(std::move(index), fading, next_refit);
  store_.rule.learned();
}

}  // namespace kvell::memory
