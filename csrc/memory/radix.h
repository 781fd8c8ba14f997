// A compressed radix tree over tokens; beside each node, the pages whose last token it
// holds. Semantics of tests/oracle/index/radix.py. Whole pages of tokens lie by position, with holes;
// what has another place (half-full pages, states, pages of images) is a mark.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pool.h"

namespace kvell::memory {

constexpr int32_t kNoNode = 0;
constexpr int32_t kNoPage = -1;

// Tokens begin … begin+size-1 of a prefix, with the absolute position of the first.
struct Tokens {
  const int32_t* data;
  int64_t begin;
  int64_t size;

  int64_t end() const { return begin + size; }
  const int32_t* at(int64_t position) const { return data + (position - begin); }
};

struct Child {
  int32_t token;
  int32_t node;
};

// Pages at places of their own, (end, part) in tests/oracle/index/radix.py: all of one end. A long prompt of a
// model with states has hundreds of ends, each with a state of dozens of pages.
struct Mark {
  int32_t group, end;
  int32_t tag = 0;    // what the first of its pages was named with
  int32_t count = 0;  // of its pages that are there
  std::vector<int32_t> slots{};  // by part; kNoPage in holes

  bool operator<(const Mark& other) const {
    return group != other.group ? group < other.group : end < other.end;
  }
  int32_t at(int64_t part) const {
    return part < int64_t(slots.size()) ? slots[size_t(part)] : kNoPage;
  }
};
using Marks = std::vector<Mark>;  // in order

struct Named {  // how the index knew a page; of a whole page of tokens both are 0
  int32_t part, tag;
};

struct Node {
  std::vector<int32_t> tokens;
  std::vector<std::vector<int32_t>> pages;  // per group, from first_position on
  Marks marks;
  std::vector<Child> children;              // by token
  int64_t start = 0;
  int32_t parent = kNoNode;
  int32_t holders = 0;
  int32_t num_pages = 0;
  uint32_t watch = 0;  // see RadixTree::watch

  int64_t end() const { return start + int64_t(tokens.size()); }
  // Position of the first page whose last token is at `start` or later.
  int64_t first_position(int32_t page_tokens) const { return int32_t(start) / page_tokens; }
  bool needed() const { return holders || num_pages || !children.empty(); }
  // As new, but for the room of what was small: the next node takes it over.
  void reset() {
    empty(tokens);
    for (std::vector<int32_t>& of_group : pages) empty(of_group);
    marks.clear();
    children.clear();
    start = 0;
    parent = kNoNode;
    holders = num_pages = 0;
    watch = 0;
  }

 private:
  static constexpr size_t kKept = 256;  // numbers that there may be room for
  static void empty(std::vector<int32_t>& numbers) {
    numbers.clear();
    if (numbers.capacity() > kKept) std::vector<int32_t>().swap(numbers);
  }
};

// Nodes by number; they stay where they are.
class Nodes {
 public:
  Node& operator[](int32_t id) { return parts_[size_t(id) >> kShift][size_t(id) & kMask]; }
  const Node& operator[](int32_t id) const {
    return parts_[size_t(id) >> kShift][size_t(id) & kMask];
  }
  int32_t size() const { return size_; }
  int32_t add() {
    if (!(size_t(size_) & kMask)) parts_.emplace_back(new Node[kMask + 1]);
    return size_++;
  }

 private:
  static constexpr int kShift = 6;
  static constexpr size_t kMask = (size_t(1) << kShift) - 1;

  std::vector<std::unique_ptr<Node[]>> parts_;
  int32_t size_ = 0;
};

// Along a path, of one group; with pages of which a prompt shares the first tokens, where
// it parts from what is known. It refers to the tree, and holds until that changes.
struct Found {
  std::vector<int32_t> whole;  // by position; kNoPage in holes
  std::vector<const Mark*> marks;  // in order

  // The first mark that ends there or later.
  std::vector<const Mark*>::const_iterator from(int64_t end) const {
    return std::lower_bound(marks.begin(), marks.end(), end,
                            [](const Mark* mark, int64_t value) { return mark->end < value; });
  }
};

// The path that a prompt shares with the tree.
struct Path {
  int32_t node = kNoNode;  // the last one; kNoNode if the root name is unknown
  int64_t length = 0;
  std::vector<Found> found;  // per group; only a model's own are filled
};

class RadixTree {
 public:
  RadixTree(const Groups& groups, Pool& pool) : groups_(groups), pool_(pool) { nodes_.add(); }

  int32_t root(const std::string& name);
  void match(const std::string& root, Tokens tokens, const Model& model, Path& path) const;
  // The node that holds the last of `tokens`, all of them known; else kNoNode.
  int32_t find(const std::string& root, Tokens tokens) const;
  // Puts `tokens` below a known prefix; returns the node they end in. The prefix is
  // `tokens.begin` long; its node may have been split since, never merged.
  int32_t extend(int32_t node, Tokens tokens);
  // The node on the path to `node` that holds token length-1.
  int32_t at(int32_t node, int64_t length) const;
  // Names a page at a place on the path that ends in `node`, unless one is there.
  bool put(int32_t node, int32_t group, int64_t end, int32_t part, int32_t slot, int32_t tag);
  // The same for whole pages of tokens from `position` on, all of which end in `node`; calls
  // named(position) for those that were not there.
  template <class Named>
  void put_run(int32_t id, int32_t group, int64_t position, const int32_t* slots, int64_t count,
               const Named& named) {
    if (count <= 0) return;
    const int32_t page_tokens = groups_[group].page_tokens;
    Node& node = nodes_[id];
    touch(node, (position + 1) * page_tokens, (position + count) * page_tokens);
    int32_t* at = pages_from(node, group, position, count);
    for (int64_t i = 0; i < count; ++i) {
      if (at[i] != kNoPage) continue;
      at[i] = slots[i];
      ++node.num_pages;
      PageRecord& page = pool_.page(slots[i]);
      page.node = id;
      page.end = int32_t((position + i + 1) * page_tokens);
      named(position + i);
    }
  }
  Named drop(int32_t group, int32_t slot);
  // What `old_slot` held, named or not, is in `new_slot` now.
  void rename(int32_t group, int32_t old_slot, int32_t new_slot);
  void hold(int32_t node) { ++nodes_[node].holders; }
  void let_go(int32_t node);
  // The page at a place on the path that ends in `node`; kNoPage in holes.
  int32_t page_at(int32_t node, int32_t group, int64_t end, int32_t part) const;
  // Calls visit(page, position) for the whole pages from a position to another, on the path
  // that ends in `node`; holes are passed over.
  template <class Visit>
  void each_page(int32_t id, int32_t group, int64_t from, int64_t stop, const Visit& visit) const {
    const int32_t size = groups_[group].page_tokens;
    while (from < stop) {
      const Node& node = nodes_[at(id, (from + 1) * size)];
      const int64_t first = node.first_position(size), here = std::max(node.end() / size, from + 1);
      const int64_t end = std::min(stop, here);
      if (size_t(group) < node.pages.size()) {
        const std::vector<int32_t>& pages = node.pages[group];
        const int64_t known = std::min(end, first + int64_t(pages.size()));
        for (int64_t p = from; p < known; ++p)
          if (pages[p - first] != kNoPage) visit(pages[p - first], p);
      }
      from = end;
    }
  }
  // Calls visit(page) for what was kept at an end that is no whole page of tokens: a state.
  template <class Visit>
  void each_part(int32_t id, int32_t group, int64_t end, const Visit& visit) const {
    const Mark* mark = mark_at(nodes_[at(id, end)], group, end);
    for (size_t part = 0; mark && part < mark->slots.size(); ++part)
      if (mark->slots[part] != kNoPage) visit(mark->slots[part]);
  }
  // Which of the pages of one end a named page is.
  int32_t part_of(int32_t group, int32_t slot);
  // A page that has a place of its own is to be known as something else.
  void retag(int32_t group, int32_t slot, int32_t tag);
  // What a named page was named with.
  int32_t tag_of(int32_t group, int32_t slot);
  // Slots have new numbers, in the same order.
  template <class NewSlot>
  void rename(const NewSlot& new_slot) {
    for (int32_t id = 0; id < nodes_.size(); ++id) {
      Node& node = nodes_[id];
      for (Mark& mark : node.marks)
        for (int32_t& slot : mark.slots) slot = slot == kNoPage ? kNoPage : new_slot(slot);
      for (std::vector<int32_t>& pages : node.pages)
        for (int32_t& slot : pages) slot = slot == kNoPage ? kNoPage : new_slot(slot);
    }
  }

  // From now on touched() says if a page was named or dropped that a prompt might resume from:
  // the one whose path, so many tokens long, ends in `node`.
  void watch(int32_t node, int64_t length, const Model& model);
  bool touched() const { return touched_; }

  const Node& node(int32_t id) const { return nodes_[id]; }
  int64_t num_nodes() const { return num_nodes_; }

 private:
  int32_t make(int64_t start, int32_t parent);
  void prune(int32_t node);
  void forget(int32_t node);
  int32_t grow(int32_t node, Tokens rest);
  void add_tails(int32_t group, Path& path) const;
  void add_tails_of(const Node& node, int32_t group, int64_t matched, Found& found) const;
  int32_t split(int32_t node, int64_t length);
  void move_pages_up(int32_t lower, int32_t upper);
  void move_marks_up(int32_t lower, int32_t upper);
  // Do the group's pages that end there lie by position?
  bool is_whole(int32_t group, int64_t end) const {
    return groups_[group].counts_tokens() && int32_t(end) % groups_[group].page_tokens == 0;
  }
  // Pages that end at `first` … `last` are named or dropped.
  void touch(const Node& node, int64_t first, int64_t last) {
    if (first <= watched_to_ && (node.watch == watch_ || last > watched_)) touched_ = true;
  }
  int32_t* pages_from(Node& node, int32_t group, int64_t position, int64_t count);
  static bool put_mark(Node& node, int32_t group, int64_t end, int32_t part, int32_t slot,
                       int32_t tag);
  // What lies at an end, or null.
  static const Mark* mark_at(const Node& node, int32_t group, int64_t end);
  // The mark of a named page that has a place of its own, and the page's part.
  std::pair<Mark*, size_t> mark_of(int32_t group, int32_t slot);

  const Groups& groups_;
  Pool& pool_;
  Nodes nodes_;  // [0] stands for no node
  std::vector<int32_t> free_;
  std::unordered_map<std::string, int32_t> roots_;
  std::unordered_map<int32_t, std::string> names_;
  int64_t num_nodes_ = 0;
  uint32_t watch_ = 0;       // nodes with this mark are on the path that is watched
  int64_t watched_ = 0;      // its length
  int64_t watched_to_ = -1;  // where the next page ends, in whatever group
  bool touched_ = false;
};

}  // namespace kvell::memory
