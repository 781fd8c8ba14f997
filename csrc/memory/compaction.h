// Gathering a request's scattered pages into large pages of its own (prefix/compaction.py).
#pragma once
#include <map>

#include "holders.h"
#include "store.h"

namespace kvell::memory {

struct Move {  // of a page of a holder
  Holder* holder;
  int32_t group;
  int64_t position;
  int32_t old_slot, new_slot;
};

class Compactor {
 public:
  explicit Compactor(Store& store) : store_(store) {}

  // Fills at most so many large pages. Old pages are their holders' sources until copied.
  std::vector<Move> compact(const std::map<int32_t, Holder*>& holders, int64_t most_large);

 private:
  bool is_worth_it() const;
  bool is_spare() const;
  void visit(Holder& holder, int64_t& most_large, std::vector<Move>& moves);
  void find_scattered(int32_t group, GroupPages& held);
  void note_scanned(int32_t group, GroupPages& held, int64_t end);
  void scan(const GroupPages& held, int64_t from, int64_t end, int64_t most);
  void move(Holder& holder, int32_t group, std::vector<Move>& moves);

  Store& store_;
  int32_t last_ = 0;     // handle that was looked at last
  int64_t scanned_ = 0;  // pages, in this call
  std::vector<int64_t> positions_;
};

}  // namespace kvell::memory
