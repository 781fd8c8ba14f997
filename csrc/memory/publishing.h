// What becomes of pages as a request goes on: named in the index, left behind, given back
// (tests/oracle/core/publishing.py).
#pragma once
#include "resuming.h"

namespace kvell::memory {

class Publisher {
 public:
  explicit Publisher(Store& store)
      : store_(store), resuming_(store), checkpoint_pages_(store.groups.size(), 0) {}

  // The holder has so many tokens computed, all of them known.
  void advance(Holder& holder, int64_t computed);
  bool cannot_receive(const Holder& holder, int64_t computed) const;
  // What is computed of so many tokens comes from elsewhere, before the next advance.
  void receive(Holder& holder, int64_t computed);
  // So many of its first tokens lie elsewhere from now on, in full attention groups.
  void send_away(Holder& holder, int64_t away_tokens);
  // The holder uses nothing any more; `renew` keeps what ends with it.
  void give_back(Holder& holder, bool renew, bool returns);
  // The holder is a request from now on.
  void note_used(const Holder& holder);
  // Tokens up to which the index will know the holder's once so many are computed.
  int64_t published_at(const Holder& holder, int64_t computed) const;
  // Per group, pages of states written on the way, so far.
  const Counts& checkpoint_pages() const { return checkpoint_pages_; }
  void add_groups() { checkpoint_pages_.resize(store_.groups.size(), 0); }

 private:
  static constexpr int64_t kKeepKey = -1;  // instead of a rank: no access

  int64_t whole_at(const Holder& holder, int64_t computed) const;
  void publish(Holder& holder);
  void extend(Holder& holder, int64_t length);
  void publish_pages(Holder& holder, int32_t group);
  void publish_returned(Holder& holder);
  void name_pages(const Holder& holder, int32_t group, int64_t begin, int64_t end);
  void publish_images(Holder& holder, int32_t group);
  void publish_embeddings(Holder& holder);
  void publish_states(Holder& holder);
  void publish_end(Holder& holder);
  void name(Holder& holder, int32_t group, int64_t end, int32_t part, int32_t slot, int64_t rank,
            Sort sort = Sort::kFine);
  int64_t end_rank(int32_t group) const;
  void renew_points(Holder& holder, const std::vector<int64_t>& lengths, int64_t time);
  void renew_window(const Holder& holder, int32_t group, int64_t length, int64_t time);
  void renew(const Holder& holder, int32_t slot, int64_t end, int64_t time);
  const Run& run_of(const Holder& holder, int64_t token) const;
  Key key(const Holder& holder, int32_t slot, int64_t rank, int64_t time, int64_t length,
          int64_t token, bool own = true) const;
  void leave_behind(Holder& holder);
  void drop(Holder& holder);
  void release(Holder& holder, int32_t group, int64_t count, int64_t rank);
  void release_images(Holder& holder, int32_t group, int64_t count, int64_t rank);
  void release_page(const Holder& holder, int32_t slot, int64_t rank, int64_t length,
                    int64_t token, bool own = true);
  void let_sources_go(Holder& holder, bool renew);
  void take_known(Holder& holder);
  void take_images(Holder& holder, int32_t group);
  void take_pages(Holder& holder, int32_t group);
  void keep_end(Holder& holder, int32_t group);
  void keep(Holder& holder, const Source& source);
  Tokens tokens_between(const Holder& holder, int64_t begin, int64_t end);

  Store& store_;
  Resuming resuming_;
  Counts checkpoint_pages_;
  std::vector<int32_t> tail_;  // scratch
  Path path_;                  // scratch
  mutable size_t run_at_ = 0;  // of the last one asked for
};

}  // namespace kvell::memory
