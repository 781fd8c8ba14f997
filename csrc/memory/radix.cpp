#include "radix.h"

#include <algorithm>
#include <cstring>

namespace kvell::memory {
namespace {

int64_t common_prefix(const int32_t* left, const int32_t* right, int64_t size) {
  constexpr int64_t kStride = 64;  // tokens that memcmp looks at in one go
  int64_t at = 0;
  while (at + kStride <= size && !std::memcmp(left + at, right + at, kStride * sizeof(int32_t)))
    at += kStride;
  while (at < size && left[at] == right[at]) ++at;
  return at;
}

auto place_of(const std::vector<Child>& children, int32_t token) {
  return std::lower_bound(children.begin(), children.end(), token,
                          [](const Child& child, int32_t value) { return child.token < value; });
}

int32_t child_of(const Node& node, int32_t token) {
  const auto at = place_of(node.children, token);
  return at != node.children.end() && at->token == token ? at->node : kNoNode;
}

// Adds the child, or puts it in the place of the one that starts alike.
void set_child(Node& node, int32_t token, int32_t id) {
  const auto at = node.children.begin() + (place_of(node.children, token) - node.children.begin());
  if (at != node.children.end() && at->token == token)
    at->node = id;
  else
    node.children.insert(at, {token, id});
}

// Appends a node's pages of one group that end within the first `length` tokens.
void collect(const Node& node, int32_t group, int32_t page_tokens, int64_t length, Found& found) {
  const int64_t count = length / page_tokens - node.first_position(page_tokens);
  int64_t known = 0;
  if (size_t(group) < node.pages.size()) {
    const std::vector<int32_t>& pages = node.pages[group];
    known = std::min<int64_t>(count, pages.size());
    found.whole.insert(found.whole.end(), pages.begin(), pages.begin() + known);
  }
  found.whole.insert(found.whole.end(), count - known, kNoPage);
}

}  // namespace

int32_t RadixTree::root(const std::string& name) {
  const auto known = roots_.find(name);
  if (known != roots_.end()) return known->second;
  const int32_t id = make(0, kNoNode);
  roots_.emplace(name, id);
  names_.emplace(id, name);
  return id;
}

void RadixTree::match(const std::string& root, Tokens tokens, const Model& model,
                      Path& path) const {
  path.node = kNoNode;
  path.length = 0;
  path.found.resize(groups_.size());
  for (Found& found : path.found) {
    found.whole.clear();
    found.marks.clear();
  }
  const auto known = roots_.find(root);
  if (known == roots_.end()) return;
  path.node = known->second;
  while (path.length < tokens.size) {
    const int32_t id = child_of(nodes_[path.node], tokens.data[path.length]);
    if (!id) break;
    const Node& node = nodes_[id];
    const int64_t size = std::min<int64_t>(node.tokens.size(), tokens.size - path.length);
    path.length += common_prefix(node.tokens.data(), tokens.data + path.length, size);
    path.node = id;
    for (const int32_t g : model.own)
      if (groups_[g].counts_tokens())
        collect(node, g, groups_[g].page_tokens, path.length, path.found[g]);
    for (const Mark& mark : node.marks)
      if (mark.end <= path.length) path.found[mark.group].marks.push_back(&mark);
    if (path.length < node.end()) break;
  }
  if (!path.length) return;
  for (const int32_t g : model.own)
    if (groups_[g].counts_tokens() && path.length % groups_[g].page_tokens) add_tails(g, path);
}

int32_t RadixTree::find(const std::string& root, Tokens tokens) const {
  const auto known = roots_.find(root);
  if (known == roots_.end()) return kNoNode;
  int32_t id = known->second;
  for (int64_t length = 0; length < tokens.size;) {
    id = child_of(nodes_[id], tokens.data[length]);
    if (!id) return kNoNode;
    const Node& node = nodes_[id];
    const int64_t size = std::min<int64_t>(node.tokens.size(), tokens.size - length);
    if (common_prefix(node.tokens.data(), tokens.data + length, size) < size) return kNoNode;
    length += size;
  }
  return id;
}

// From the nodes below where the path ends: the first few.
void RadixTree::add_tails(int32_t group, Path& path) const {
  constexpr size_t kBelowNodes = 8;  // BELOW_NODES in tests/oracle/index/radix.py
  const int32_t page_tokens = groups_[group].page_tokens;
  const int64_t end = (path.length / page_tokens + 1) * page_tokens;
  std::vector<int32_t> stack{path.node};
  for (size_t seen = 0; !stack.empty() && seen < kBelowNodes;) {
    const Node& node = nodes_[stack.back()];
    stack.pop_back();
    if (node.end() > path.length) {
      ++seen;
      add_tails_of(node, group, path.length, path.found[group]);
    }
    if (node.end() >= end) continue;
    // Later children are not reached.
    for (size_t i = std::min(node.children.size(), kBelowNodes); i-- > 0;)
      stack.push_back(node.children[i].node);
  }
}

void RadixTree::add_tails_of(const Node& node, int32_t group, int64_t matched,
                             Found& found) const {
  const int32_t page_tokens = groups_[group].page_tokens;
  const int64_t position = matched / page_tokens, end = (position + 1) * page_tokens;
  const int64_t index = position - node.first_position(page_tokens);
  if (node.start < end && end <= node.end() && size_t(group) < node.pages.size() &&
      index < int64_t(node.pages[group].size()) && node.pages[group][index] != kNoPage &&
      int64_t(found.whole.size()) == position)
    found.whole.push_back(node.pages[group][index]);
  const Mark first{group, int32_t(matched) + 1};
  auto mark = std::lower_bound(node.marks.begin(), node.marks.end(), first);
  for (; mark != node.marks.end() && mark->group == group && mark->end < end; ++mark) {
    const auto at = found.from(mark->end);
    if (at == found.marks.end() || mark->end < (*at)->end) found.marks.insert(at, &*mark);
  }
}

int32_t RadixTree::extend(int32_t id, Tokens tokens) {
  int64_t length = tokens.begin;
  id = at(id, length);
  while (length < tokens.end()) {
    const Node& node = nodes_[id];
    if (length < node.end()) {
      const int64_t size = std::min(node.end(), tokens.end()) - length;
      length += common_prefix(&node.tokens[length - node.start], tokens.at(length), size);
      if (length < tokens.end() && length < node.end()) id = split(id, length);
      continue;
    }
    const int32_t child = child_of(node, *tokens.at(length));
    if (!child) return grow(id, {tokens.at(length), length, tokens.end() - length});
    id = child;
  }
  return at(id, length);
}

int32_t RadixTree::at(int32_t id, int64_t length) const {
  while (nodes_[id].parent && length <= nodes_[id].start) id = nodes_[id].parent;
  return id;
}

bool RadixTree::put(int32_t id, int32_t group, int64_t end, int32_t part, int32_t slot,
                    int32_t tag) {
  const int32_t home = at(id, end);
  if (is_whole(group, end)) {
    bool is_new = false;
    put_run(home, group, end / groups_[group].page_tokens - 1, &slot, 1,
            [&is_new](int64_t) { is_new = true; });
    return is_new;
  }
  Node& node = nodes_[home];
  if (!put_mark(node, group, end, part, slot, tag)) return false;
  touch(node, end, end);
  ++node.num_pages;
  PageRecord& page = pool_.page(slot);
  page.node = home;
  page.end = int32_t(end);
  return true;
}

// Where the node's pages lie from a position on, with room for so many.
int32_t* RadixTree::pages_from(Node& node, int32_t group, int64_t position, int64_t count) {
  if (size_t(group) >= node.pages.size()) node.pages.resize(groups_.size());
  std::vector<int32_t>& pages = node.pages[group];
  const size_t index = size_t(position - node.first_position(groups_[group].page_tokens));
  if (index + size_t(count) > pages.size()) pages.resize(index + size_t(count), kNoPage);
  return &pages[index];
}

bool RadixTree::put_mark(Node& node, int32_t group, int64_t end, int32_t part, int32_t slot,
                         int32_t tag) {
  const Mark wanted{group, int32_t(end)};
  auto at = std::lower_bound(node.marks.begin(), node.marks.end(), wanted);
  if (at == node.marks.end() || wanted < *at) at = node.marks.insert(at, wanted);
  if (at->at(part) != kNoPage) return false;
  if (size_t(part) >= at->slots.size()) at->slots.resize(size_t(part) + 1, kNoPage);
  at->slots[size_t(part)] = slot;
  ++at->count;
  if (!part) at->tag = tag;
  return true;
}

const Mark* RadixTree::mark_at(const Node& node, int32_t group, int64_t end) {
  const Mark wanted{group, int32_t(end)};
  const auto at = std::lower_bound(node.marks.begin(), node.marks.end(), wanted);
  return at != node.marks.end() && !(wanted < *at) ? &*at : nullptr;
}

std::pair<Mark*, size_t> RadixTree::mark_of(int32_t group, int32_t slot) {
  const PageRecord& page = pool_.page(slot);
  Marks& marks = nodes_[page.node].marks;
  const Mark wanted{group, page.end};
  const auto at = std::lower_bound(marks.begin(), marks.end(), wanted);
  const auto part = std::find(at->slots.begin(), at->slots.end(), slot);
  return {&*at, size_t(part - at->slots.begin())};
}

int32_t RadixTree::part_of(int32_t group, int32_t slot) {
  return is_whole(group, pool_.page(slot).end) ? 0 : int32_t(mark_of(group, slot).second);
}

int32_t RadixTree::page_at(int32_t id, int32_t group, int64_t end, int32_t part) const {
  const Node& node = nodes_[at(id, end)];
  if (is_whole(group, end)) {
    const int32_t size = groups_[group].page_tokens;
    const int64_t index = end / size - 1 - node.first_position(size);
    const std::vector<int32_t>& pages = node.pages[group];
    return index >= 0 && index < int64_t(pages.size()) ? pages[index] : kNoPage;
  }
  const Mark* mark = mark_at(node, group, end);
  return mark ? mark->at(part) : kNoPage;
}

void RadixTree::retag(int32_t group, int32_t slot, int32_t tag) {
  const PageRecord& page = pool_.page(slot);
  if (!page.node || is_whole(group, page.end)) return;
  Mark& mark = *mark_of(group, slot).first;
  if (mark.tag) mark.tag = tag;
}

int32_t RadixTree::tag_of(int32_t group, int32_t slot) {
  const PageRecord& page = pool_.page(slot);
  if (!page.node || is_whole(group, page.end)) return 0;
  return mark_of(group, slot).first->tag;
}

Named RadixTree::drop(int32_t group, int32_t slot) {
  const PageRecord& page = pool_.page(slot);
  Node& node = nodes_[page.node];
  const int32_t page_tokens = groups_[group].page_tokens;
  touch(node, page.end, page.end);
  Named named{0, 0};
  if (is_whole(group, page.end)) {
    node.pages[group][page.end / page_tokens - 1 - node.first_position(page_tokens)] = kNoPage;
  } else {
    const auto [mark, part] = mark_of(group, slot);
    named = {int32_t(part), mark->tag};
    mark->slots[part] = kNoPage;
    if (!--mark->count) node.marks.erase(node.marks.begin() + (mark - node.marks.data()));
  }
  if (!--node.num_pages) prune(page.node);
  return named;
}

void RadixTree::rename(int32_t group, int32_t old_slot, int32_t new_slot) {
  PageRecord &old = pool_.page(old_slot), &renamed = pool_.page(new_slot);
  if (!old.node) return;
  Node& node = nodes_[old.node];
  const int32_t page_tokens = groups_[group].page_tokens;
  if (is_whole(group, old.end)) {
    node.pages[group][old.end / page_tokens - 1 - node.first_position(page_tokens)] = new_slot;
  } else {
    const auto [mark, part] = mark_of(group, old_slot);
    mark->slots[part] = new_slot;
  }
  renamed.key = old.key;
  renamed.node = old.node;
  renamed.end = old.end;
  old.node = 0;
}

void RadixTree::watch(int32_t node, int64_t length, const Model& model) {
  ++watch_;
  watched_ = watched_to_ = length;
  for (const int64_t size : model.page_sizes)
    watched_to_ = std::max(watched_to_, (length / size + 1) * size);
  touched_ = false;
  for (; node; node = nodes_[node].parent) nodes_[node].watch = watch_;
}

void RadixTree::let_go(int32_t id) {
  --nodes_[id].holders;
  prune(id);
}

// Removes the node and its ancestors as far as nothing needs them, root included.
void RadixTree::prune(int32_t id) {
  while (!nodes_[id].needed()) {
    const int32_t parent = nodes_[id].parent;
    if (!parent) {
      const auto name = names_.find(id);
      roots_.erase(name->second);
      names_.erase(name);
      forget(id);
      return;
    }
    std::vector<Child>& children = nodes_[parent].children;
    children.erase(children.begin() +
                   (place_of(children, nodes_[id].tokens[0]) - children.begin()));
    forget(id);
    id = parent;
  }
}

int32_t RadixTree::make(int64_t start, int32_t parent) {
  int32_t id;
  if (free_.empty()) {
    id = nodes_.add();
  } else {
    id = free_.back();
    free_.pop_back();
  }
  Node& node = nodes_[id];
  node.start = start;
  node.parent = parent;
  ++num_nodes_;
  return id;
}

void RadixTree::forget(int32_t id) {
  nodes_[id].reset();
  free_.push_back(id);
  --num_nodes_;
}

int32_t RadixTree::grow(int32_t id, Tokens rest) {
  if (nodes_[id].parent && nodes_[id].children.empty()) {
    std::vector<int32_t>& tokens = nodes_[id].tokens;
    tokens.insert(tokens.end(), rest.data, rest.data + rest.size);
    return id;
  }
  const int32_t child = make(rest.begin, id);
  nodes_[child].tokens.assign(rest.data, rest.data + rest.size);
  set_child(nodes_[id], rest.data[0], child);
  return child;
}

// Cuts a node after prefix `length`; it keeps the lower part. Returns the upper.
int32_t RadixTree::split(int32_t id, int64_t length) {
  const int32_t upper_id = make(nodes_[id].start, nodes_[id].parent);
  Node &upper = nodes_[upper_id], &lower = nodes_[id];
  upper.watch = lower.watch;
  const auto cut = lower.tokens.begin() + (length - lower.start);
  upper.tokens.assign(lower.tokens.begin(), cut);
  set_child(nodes_[upper.parent], upper.tokens[0], upper_id);
  lower.tokens.erase(lower.tokens.begin(), cut);
  move_pages_up(id, upper_id);
  lower.start = length;
  lower.parent = upper_id;
  set_child(upper, lower.tokens[0], id);
  return upper_id;
}

void RadixTree::move_pages_up(int32_t lower_id, int32_t upper_id) {
  Node &upper = nodes_[upper_id], &lower = nodes_[lower_id];
  upper.pages.resize(lower.pages.size());
  for (size_t g = 0; g < lower.pages.size(); ++g) {
    const int32_t page_tokens = groups_[g].page_tokens;
    std::vector<int32_t>& pages = lower.pages[g];
    const int64_t count = upper.end() / page_tokens - upper.first_position(page_tokens);
    const auto cut = pages.begin() + std::min<int64_t>(count, pages.size());
    upper.pages[g].assign(pages.begin(), cut);
    pages.erase(pages.begin(), cut);
    for (const int32_t slot : upper.pages[g]) {
      if (slot == kNoPage) continue;
      pool_.page(slot).node = upper_id;
      ++upper.num_pages;
      --lower.num_pages;
    }
  }
  move_marks_up(lower_id, upper_id);
}

void RadixTree::move_marks_up(int32_t lower_id, int32_t upper_id) {
  Node &upper = nodes_[upper_id], &lower = nodes_[lower_id];
  Marks staying;
  for (Mark& mark : lower.marks) {
    if (mark.end > upper.end()) {
      staying.push_back(std::move(mark));
      continue;
    }
    for (const int32_t slot : mark.slots)
      if (slot != kNoPage) pool_.page(slot).node = upper_id;
    upper.num_pages += mark.count;
    lower.num_pages -= mark.count;
    upper.marks.push_back(std::move(mark));
  }
  lower.marks = std::move(staying);
}

}  // namespace kvell::memory
