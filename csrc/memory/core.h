// The memory core: pool, tables and prefix index behind calls for whole batches.
// Every decision equals prefix/core.py's ReferenceCore; that file says what and why.
#pragma once
#include <map>
#include <memory>
#include <optional>

#include "eviction.h"
#include "hits.h"
#include "placer.h"

namespace kvell::memory {

struct GroupPages {  // a holder's pages in one group: positions first … end-1
  int64_t first = 0;
  std::vector<int32_t> slots;

  int64_t end() const { return first + int64_t(slots.size()); }
};

struct Holder {
  int32_t handle;
  int32_t node;
  int64_t hit_tokens;
  int64_t computed;
  int64_t published;
  int64_t expected_tokens;
  std::optional<int64_t> lease_until;
  // What lets most steps end after one comparison:
  int64_t room_tokens = 0;  // tokens that the pages held can take in every group
  int64_t next_event = 0;   // computed tokens at which a page is to publish or leave behind
  std::vector<GroupPages> groups;
  std::vector<int32_t> prompt;
  std::vector<int32_t> generated;

  int64_t num_tokens() const { return int64_t(prompt.size() + generated.size()); }
};

struct UnknownHandle {
  int32_t handle;
};

template <class T>
struct Span {
  const T* data;
  int64_t size;
  const T& operator[](int64_t i) const { return data[i]; }
};
using Ints = Span<int32_t>;

struct Row {  // one new page, as the caller sees it
  int32_t index, group, position, page;
};

class Core {
 public:
  Core(Groups groups, int32_t num_large, const Sharing& sharing);

  void begin_step(int64_t step);
  int64_t peek(Ints tokens, const std::string& root);
  int32_t open(Ints tokens, const std::string& root, std::optional<int64_t> lease_until,
               bool reuse);
  void claim(int32_t handle, int64_t expected_tokens);
  int64_t hit_tokens(int32_t handle) const { return holder(handle).hit_tokens; }
  int64_t grow(Ints handles, Ints until, std::vector<Row>& rows);
  int64_t largest(int32_t handle, int64_t until);
  void held_pages(int32_t handle, std::vector<Row>& rows) const;
  bool fits(int32_t handle, int64_t until, int64_t chunk_tokens, Ints others, Ints others_until);
  void append(Ints handles, Ints tokens);
  void advance(Ints handles, Ints computed);
  void close(int32_t handle, bool renew);

  // For snapshots.
  const Groups& groups() const { return groups_; }
  Pool& pool() { return pool_; }
  const RadixTree& tree() const { return tree_; }
  const Placer& placer() const { return placer_; }
  int64_t total_hit_tokens() const { return total_hit_tokens_; }
  const Counts& group_hit_tokens() const { return group_hit_tokens_; }
  std::vector<const Holder*> holders() const;

 private:
  struct Want {
    int64_t index;
    Holder* holder;
  };

  Holder& holder(int32_t handle) const;
  int64_t match(Ints tokens, const std::string& root);
  bool missing(const Holder& holder, int64_t until, int64_t* need) const;
  int64_t longest_feasible(int64_t calls);
  void place(const Want& want, const int64_t* need, Counts& left, std::vector<Row>& rows);
  void add_peak(const Holder& holder, int64_t until, int64_t chunk, Counts& need) const;
  void check_advance(const Holder& holder, int64_t computed) const;
  void publish(Holder& holder);
  Tokens tokens_between(const Holder& holder, int64_t begin, int64_t end);
  void leave_behind(Holder& holder);
  void foresee(Holder& holder) const;

  const Groups groups_;
  const EvictionRule rule_{};
  int64_t publish_tokens_;  // prefixes are published in steps of the smallest page
  Pool pool_;
  RadixTree tree_;
  Placer placer_;
  std::unordered_map<int32_t, std::unique_ptr<Holder>> holders_;
  std::map<int32_t, int64_t> leases_;  // handle to last step
  int32_t next_handle_ = 1;
  int64_t step_ = 0;
  int64_t total_hit_tokens_ = 0;
  Counts group_hit_tokens_;
  // Scratch that keeps its memory from call to call.
  Path path_;
  std::vector<std::vector<int32_t>> runs_;
  std::vector<Want> wants_;
  Counts needs_;  // one row of groups for each of wants_
  std::vector<Holder*> called_;
  std::vector<int32_t> tail_;
};

}  // namespace kvell::memory
