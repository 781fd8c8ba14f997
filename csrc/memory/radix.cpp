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
void collect(const Node& node, int32_t group, int32_t page_tokens, int64_t length, Path& path) {
  std::vector<int32_t>& found = path.found[group];
  const std::vector<int32_t>& pages = node.pages[group];
  const int64_t count = length / page_tokens - node.first_position(page_tokens);
  const int64_t known = std::min<int64_t>(count, pages.size());
  found.insert(found.end(), pages.begin(), pages.begin() + known);
  found.insert(found.end(), count - known, kNoPage);
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

void RadixTree::match(const std::string& root, Tokens tokens, Path& path) const {
  path.node = kNoNode;
  path.length = 0;
  path.found.resize(groups_.size());
  for (auto& found : path.found) found.clear();
  const auto known = roots_.find(root);
  if (known == roots_.end()) return;
  path.node = known->second;
  while (path.length < tokens.size) {
    const int32_t id = child_of(nodes_[path.node], tokens.data[path.length]);
    if (!id) return;
    const Node& node = nodes_[id];
    const int64_t size = std::min<int64_t>(node.tokens.size(), tokens.size - path.length);
    path.length += common_prefix(node.tokens.data(), tokens.data + path.length, size);
    path.node = id;
    for (size_t g = 0; g < groups_.size(); ++g)
      collect(node, int32_t(g), groups_[g].page_tokens, path.length, path);
    if (path.length < node.end()) return;
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

bool RadixTree::put(int32_t id, int32_t group, int64_t position, int32_t slot) {
  const int32_t page_tokens = groups_[group].page_tokens;
  const int32_t home = at(id, (position + 1) * page_tokens);
  Node& node = nodes_[home];
  std::vector<int32_t>& pages = node.pages[group];
  const size_t index = size_t(position - node.first_position(page_tokens));
  if (index >= pages.size()) pages.resize(index + 1, kNoPage);
  if (pages[index] != kNoPage) return false;
  pages[index] = slot;
  ++node.num_pages;
  PageRecord& page = pool_.page(slot);
  page.node = home;
  page.position = int32_t(position);
  return true;
}

void RadixTree::drop(int32_t group, int32_t slot) {
  const PageRecord& page = pool_.page(slot);
  Node& node = nodes_[page.node];
  node.pages[group][page.position - node.first_position(groups_[group].page_tokens)] = kNoPage;
  --node.num_pages;
  prune(page.node);
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
  int32_t id = int32_t(nodes_.size());
  if (free_.empty()) {
    nodes_.emplace_back();
  } else {
    id = free_.back();
    free_.pop_back();
  }
  Node& node = nodes_[id];
  node.start = start;
  node.parent = parent;
  node.pages.resize(groups_.size());
  ++num_nodes_;
  return id;
}

void RadixTree::forget(int32_t id) {
  nodes_[id] = Node{};
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
  for (size_t g = 0; g < groups_.size(); ++g) {
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
}

}  // namespace kvell::memory
