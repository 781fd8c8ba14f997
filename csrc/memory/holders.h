// Who references pages: running requests and leases (tests/oracle/placement/holders.py).
#pragma once
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "needs.h"
#include "usefulness.h"

namespace kvell::memory {

// Slots of neighbouring pages. They are taken from the front, a page at a time, as a window goes
// on: those behind stay where they are until half of the room is empty.
class Slots {
 public:
  size_t size() const { return all_.size() - front_; }
  bool empty() const { return !size(); }
  int32_t operator[](size_t at) const { return all_[front_ + at]; }
  int32_t& operator[](size_t at) { return all_[front_ + at]; }
  const int32_t* begin() const { return all_.data() + front_; }
  const int32_t* end() const { return all_.data() + all_.size(); }
  void assign(const int32_t* from, const int32_t* to) {
    front_ = 0;
    all_.assign(from, to);
  }
  // Where more are put; its size counts those taken too.
  std::vector<int32_t>& tail() { return all_; }
  void drop_front(size_t count) {
    front_ += count;
    if (front_ * 2 <= all_.size()) return;
    all_.erase(all_.begin(), all_.begin() + int64_t(front_));
    front_ = 0;
  }
  void keep_front(size_t count) { all_.resize(front_ + count); }
  // So many from `at` on are the first ones from now on.
  void bring_to_front(size_t at, size_t count) {
    const auto first = all_.begin() + int64_t(front_), from = first + int64_t(at);
    std::rotate(first, from, from + int64_t(count));
  }

 private:
  std::vector<int32_t> all_;
  size_t front_ = 0;
};

struct GroupPages {  // a holder's pages in one group: positions first … end-1
  int64_t first = 0;
  int64_t published = 0;  // positions before it are in the index, or not to be
  Slots slots;
  // Pages before it came home from another instance since the last advance, and have no name yet.
  int64_t returned_to = 0;
  // Of those before `scanned_to` no more than `scattered` could be gathered, as long as the pool
  // says `thinned` (compaction.h).
  int64_t scanned_to = 0, scattered = 0, thinned = -1;

  int64_t end() const { return first + int64_t(slots.size()); }
  // Of the slots from `known` on, which are new, so many come before all others.
  void bring_home(size_t known, int64_t count) {
    slots.bring_to_front(known, size_t(count));
    returned_to = std::max(returned_to, first);
    first -= count;
    thinned = -1;  // nobody has looked through them
  }
};

struct Source {  // a cached page that the holder's new page at a position is copied from
  int32_t group;
  int32_t slot;
  int64_t position;
  int64_t length;  // prefix it stands for
};

// Embeddings are found by their images' content alone, whatever the text before it.
inline std::string images_root(const std::string& root) { return std::string(1, '\0') + root; }

struct Checkpoint {  // pages that a step writes the state after `end` tokens to, for the index
  int32_t group;
  int64_t end;
  Sort sort;
  int64_t rank;
  std::vector<int32_t> slots;
};

// The tokens of a prompt. They stay where the caller has them until the request runs: most
// often one waits that is turned away at every step, and nobody reads all of its tokens.
class Text {
 public:
  // `owner` keeps the memory of `tokens`; without one they are copied.
  void open(Ints tokens, std::shared_ptr<const void> owner) {
    tokens_ = tokens;
    owner_ = std::move(owner);
    if (!owner_) copy();
  }
  void keep() {
    if (owner_) copy();
  }
  const int32_t* data() const { return tokens_.data; }
  int64_t size() const { return tokens_.size; }
  int32_t operator[](int64_t at) const { return tokens_[at]; }

 private:
  void copy() {
    copy_.assign(tokens_.data, tokens_.data + tokens_.size);
    tokens_ = {copy_.data(), tokens_.size};
    owner_.reset();
  }

  Ints tokens_{nullptr, 0};
  std::shared_ptr<const void> owner_;
  std::vector<int32_t> copy_;
};

struct alignas(64) Holder {
  // What lets most steps end after a comparison or two, in one cache line:
  Room room;               // lengths that the pages held are enough for in every group
  int64_t next_event = 0;  // computed tokens at which there is something to do
  int64_t next_cut = 0;    // the next state worth keeping ends here or later
  int64_t computed;
  int64_t hit_tokens;
  int32_t handle;
  bool drops;            // tokens of its prompt will be dropped
  bool claimed = false;  // a request has begun with it
  bool publishes;        // the index keeps what it computes
  int32_t node;
  const Model* model;
  int64_t matched_tokens;  // how far the tokens were known to the index
  int64_t published;
  int64_t expected_tokens;
  std::optional<int64_t> lease_until;
  int64_t renewed_step;  // when what its later turns resume from last counted as accessed
  bool is_over = false;    // it gives everything back
  bool receiving = false;  // what it has computed comes from elsewhere, maybe still
  bool is_reservation = false;  // its pages belong to no text yet
  std::vector<GroupPages> groups;
  Facts facts;
  std::vector<Source> sources;
  std::vector<Checkpoint> checkpoints;
  Text prompt;
  std::vector<int32_t> generated;
  std::string root;       // of its prompt
  std::vector<uint64_t> named;  // chunks of its prompt, there
  std::vector<Run> runs;  // classes of its prefixes, once it ends
  Hint hint = Hint::kNone;
  std::string images_root;  // where the index knows embeddings by what they show

  // Are the pages held enough to compute so many tokens?
  bool has_room(int64_t tokens) const { return tokens <= room.to && tokens >= room.from; }
  int64_t num_tokens() const { return prompt.size() + int64_t(generated.size()); }
};

}  // namespace kvell::memory
