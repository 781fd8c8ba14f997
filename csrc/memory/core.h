// The memory core: pool, tables and prefix index behind calls for whole batches.
// Every decision equals tests/oracle/core/reference.py's ReferenceCore; that file says what and why.
#pragma once
#include <map>
#include <memory>
#include <utility>

#include "checkpoints.h"
#include "compaction.h"
#include "foresight.h"
#include "growth.h"
#include "handles.h"
#include "withholding.h"
#include "lookup.h"
#include "models.h"
#include "publishing.h"

namespace kvell::memory {

struct UnknownHandle {
  int32_t handle;
};

// The request that was turned away last: while it is the same and too little has become free
// since, it would be turned away again.
struct TurnedAway {
  int32_t handle = 0;       // of the request that was opened last
  int64_t short_large = 0;  // large pages too few for it; 0: that is not known
  int64_t freed = -1;       // what the pool had freed when it was closed; -1: it is open
};

// What a request is known by.
struct Prompt {
  Ints tokens;
  std::string root;
  std::string model;
  std::optional<int64_t> prompt_tokens;
  Ints images;  // rows of three
  std::shared_ptr<const void> owner{};  // of the tokens; none if they are gone after the call
};

class Core {
 public:
  // `names`: the model of each group.
  Core(Groups groups, const std::vector<std::string>& names, int32_t num_large,
       const Sharing& sharing, const HazardSettings& learning);

  void begin_step(int64_t step);
  void add_groups(const Groups& groups, const std::vector<std::string>& names);
  int64_t peek(const Prompt& prompt);
  // Per group, the length at which it would resume if it alone decided; -1 in other models' groups.
  std::vector<int64_t> reach(const Prompt& prompt);
  // Rows: group, position, page, tokens of the prefix that it ends.
  void known(const Prompt& prompt, PageRows& rows) {
    lookup_.known(prompt.tokens, prompt.model + "/" + prompt.root, models_.at(prompt.model), rows);
  }
  int32_t open(const Prompt& prompt, std::optional<int64_t> lease_until, bool reuse);
  void claim(int32_t handle, int64_t expected_tokens, Hint hint);
  int64_t hit_tokens(int32_t handle) const { return holder(handle).hit_tokens; }
  // What is computed of so many tokens comes from elsewhere.
  void receive(int32_t handle, int64_t computed);
  // Rows: group, position, page, tokens of the prefix that it stands for.
  void sources(int32_t handle, PageRows& rows) const;
  // Pages that belong to no text; 0 if there are too few.
  int32_t reserve(Ints counts, int64_t lease_until, const std::string& model);
  // Makes them those of a text whose tokens are computed and in them.
  void adopt(int32_t handle, Ints tokens, const std::string& root,
             std::optional<int64_t> prompt_tokens);
  // Evicts what is cached of this text alone; how many pages.
  int64_t erase(Ints tokens, const std::string& root, const std::string& model);
  int64_t grow(Ints handles, Ints until, PageRows& rows);
  int64_t largest(int32_t handle, int64_t until) const {
    return growth_.largest(holder(handle), until);
  }
  void held_pages(int32_t handle, PageRows& rows) const;
  bool fits(int32_t handle, int64_t until, int64_t chunk_tokens, Ints others, Ints others_until);
  // False only if the request that was turned away last, opened again, would not fit.
  bool may_fit() const;
  CopyRows copies() { return std::exchange(copies_, {}); }
  void checkpoint(Ints handles, Ints until, StateRows& rows);
  // Rows: handle, group, position, page that it is in now.
  void compact(int64_t most_large, PageRows& rows);
  // So many of its first tokens lie elsewhere from now on, in full attention groups.
  void send_away(int32_t handle, int64_t away_tokens);
  Withholder& withholder() { return withholder_; }
  void append(Ints handles, Ints tokens);
  void advance(Ints handles, Ints computed);
  // `returns`: its request comes again, so nothing has ended.
  void close(int32_t handle, bool renew, bool returns = false);

  // What the rule has counted since it learned last is enough to learn from.
  bool is_learning_due() const { return store_.rule.learns() && store_.rule.table().is_due(); }
  void learn(std::vector<double> index, double fading, int64_t next_refit);

  // For snapshots.
  Store& store() { return store_; }
  int64_t total_hit_tokens() const { return total_hit_tokens_; }
  const Counts& group_hit_tokens() const { return group_hit_tokens_; }
  const Counts& checkpoint_pages() const { return publisher_.checkpoint_pages(); }
  std::vector<const Holder*> holders() const;

 private:
  Holder& holder(int32_t handle) const;
  void call(Ints handles);
  void watch(const Holder& holder);
  void keep_states(Holder& holder, int32_t group, int64_t index, StateRows& rows);
  int64_t evict_node(int32_t node);
  void check_advance(const Holder& holder, int64_t computed);
  void rename_slots();

  Store store_;
  Models models_;
  Publisher publisher_;
  Compactor compactor_;
  Lookup lookup_;
  Growth growth_;
  Withholder withholder_;
  HandleMap<std::unique_ptr<Holder>> holders_;
  std::map<int32_t, Holder*> by_handle_;  // the same, in order
  std::map<int32_t, int64_t> leases_;     // handle to last step
  int32_t next_handle_ = 1;
  int64_t total_hit_tokens_ = 0;
  Counts group_hit_tokens_;
  TurnedAway turned_away_;
  CopyRows copies_;  // since they were last asked for
  // Scratch that keeps its memory from call to call.
  Counts needs_;
  std::vector<Holder*> called_;
  std::vector<Cut> cuts_;
};

}  // namespace kvell::memory
