// Pages for the tokens of a step, for all who ask at once (see tests/oracle/core/growth.py).
#pragma once
#include <array>

#include "holders.h"
#include "store.h"

namespace kvell::memory {

template <size_t kColumns>
using Row = std::array<int32_t, kColumns>;
using PageRows = std::vector<Row<4>>;   // index, group, position, page
using CopyRows = std::vector<Row<4>>;   // handle, group, source, target
using StateRows = std::vector<Row<5>>;  // index, group, end, slice, page

class Growth {
 public:
  explicit Growth(Store& store) : store_(store) {}

  // Pages still wanted for `until` tokens, per group; false if none.
  bool missing(const Holder& holder, int64_t until, int64_t* need) const;

  // One call: it begins, holders whose pages are not enough for `until` tokens ask for more, and as many of the
  // `calls` first ones as all get what they want are served.
  void begin();
  void want(int64_t index, Holder& holder, int64_t until);
  int64_t serve(int64_t calls, PageRows& rows, CopyRows& copies);

  // The most tokens up to `until` that there is room for.
  int64_t largest(const Holder& holder, int64_t until) const;
  // Adds the pages that the holder will need beyond those it holds, at its worst step up to
  // `until` tokens.
  void add_peak(const Holder& holder, int64_t until, int64_t chunk_tokens, Counts& need) const;

 private:
  struct Want {
    int64_t index;
    Holder* holder;
  };

  int64_t longest_feasible(int64_t calls);
  void place(const Want& want, const int64_t* need, PageRows& rows, CopyRows& copies);
  void note_copies(const Holder& holder, int32_t group, int64_t begin, CopyRows& copies) const;

  Store& store_;
  // Scratch that keeps its memory from call to call.
  std::vector<Want> wants_;
  Counts needs_;  // one row of groups for each of wants_
  Counts left_;   // by group: what the call still has to place
};

}  // namespace kvell::memory
