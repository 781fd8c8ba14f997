// A compressed radix tree over tokens; beside each node, per group, the pages whose
// last token it holds, by position, with holes. Semantics of prefix/radix.py.
#pragma once
#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
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

struct Node {
  std::vector<int32_t> tokens;
  std::vector<std::vector<int32_t>> pages;  // per group, from first_position on
  std::vector<Child> children;              // by token
  int64_t start = 0;
  int32_t parent = kNoNode;
  int32_t holders = 0;
  int32_t num_pages = 0;

  int64_t end() const { return start + int64_t(tokens.size()); }
  // Position of the first page whose last token is at `start` or later.
  int64_t first_position(int32_t page_tokens) const { return start / page_tokens; }
  bool needed() const { return holders || num_pages || !children.empty(); }
};

// The path that a prompt shares with the tree.
struct Path {
  int32_t node = kNoNode;  // the last one; kNoNode if the root name is unknown
  int64_t length = 0;
  std::vector<std::vector<int32_t>> found;  // per group, by position; kNoPage in holes
};

class RadixTree {
 public:
  RadixTree(const Groups& groups, Pool& pool) : groups_(groups), pool_(pool), nodes_(1) {}

  int32_t root(const std::string& name);
  void match(const std::string& root, Tokens tokens, Path& path) const;
  // Puts `tokens` below a known prefix; returns the node they end in. The prefix is
  // `tokens.begin` long; its node may have been split since, never merged.
  int32_t extend(int32_t node, Tokens tokens);
  // The node on the path to `node` that holds token length-1.
  int32_t at(int32_t node, int64_t length) const;
  // Names a page at a position of the path that ends in `node`, unless one is there.
  bool put(int32_t node, int32_t group, int64_t position, int32_t slot);
  void drop(int32_t group, int32_t slot);
  void hold(int32_t node) { ++nodes_[node].holders; }
  void let_go(int32_t node);

  const Node& node(int32_t id) const { return nodes_[id]; }
  int64_t num_nodes() const { return num_nodes_; }

 private:
  int32_t make(int64_t start, int32_t parent);
  void prune(int32_t node);
  void forget(int32_t node);
  int32_t grow(int32_t node, Tokens rest);
  int32_t split(int32_t node, int64_t length);
  void move_pages_up(int32_t lower, int32_t upper);

  const Groups groups_;
  Pool& pool_;
  std::deque<Node> nodes_;  // [0] stands for no node
  std::vector<int32_t> free_;
  std::unordered_map<std::string, int32_t> roots_;
  std::unordered_map<int32_t, std::string> names_;
  int64_t num_nodes_ = 0;
};

}  // namespace kvell::memory
