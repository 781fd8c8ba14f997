// Gathering scattered pages: into a large page of a request's own, or where others are denser
// (tests/oracle/placement/compaction.py).
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

  // Fills at most so many large pages of requests' own; while none is to spare, it frees some by
  // moving what lies in sparse ones into denser ones. Old pages are their holders' sources until copied.
  std::vector<Move> compact(const std::map<int32_t, Holder*>& holders, int64_t most_large);

 private:
  bool is_worth_it() const;
  void squeeze(Holder& holder, std::vector<Move>& moves);
  bool is_spare() const;
  void visit(Holder& holder, int64_t& most_large, std::vector<Move>& moves);
  void find_scattered(int32_t group, GroupPages& held);
  void note_scanned(int32_t group, GroupPages& held, int64_t end);
  void scan(const GroupPages& held, int64_t from, int64_t end, int64_t most);
  void move(Holder& holder, int32_t group, std::vector<Move>& moves);
  void rename(Holder& holder, int32_t group, int64_t position, int32_t to,
              std::vector<Move>& moves);

  Store& store_;
  int32_t last_ = 0;     // handle that was looked at last
  int64_t scanned_ = 0;  // pages, in this call
  int64_t rest_ = 0, rests_ = 0;  // calls that do not squeeze after one found nothing; left of them
  std::vector<int64_t> positions_;
  std::vector<int32_t> taken_;
};

}  // namespace kvell::memory
