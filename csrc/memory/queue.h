// A queue of (key, id) whose members know their place: the exact minimum, removal from
// anywhere, no stale entries. Ids are slots or large pages.
//
// Pages come in order far more often than not: a request that ends leaves its pages from the
// first to the last, all of one time. So members are chained in runs, each in order, and only
// the heads of runs are in a heap. A member that continues the last run costs a link; at
// worst every run has one member, and the queue is a heap.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "records.h"

namespace kvell::memory {

struct Entry {
  uint64_t stamp;
  uint64_t rest;  // shortness << 32 | id: one comparison breaks ties by id

  Entry(const Key& key, int32_t id)
      : stamp(key.stamp), rest(uint64_t(key.shortness) << 32 | uint32_t(id)) {}
  int32_t id() const { return int32_t(uint32_t(rest)); }
  Key key() const { return {stamp, uint32_t(rest >> 32)}; }
  bool operator<(const Entry& other) const {
    return stamp != other.stamp ? stamp < other.stamp : rest < other.rest;
  }
};

// `Record` holds the member's key, run and neighbours; `kTag` marks which of several queues
// over the same records it is in.
template <class Record, uint32_t kTag = 0>
class RunQueue {
 public:
  explicit RunQueue(ZeroArray<Record>& records) : records_(records), runs_(1) {}

  bool empty() const { return heads_.empty(); }
  const Entry& top() const { return heads_.front().entry; }

  // Who is likely to be on top soon.
  int32_t next() const {
    const int32_t after = records_[top().id()].after;
    return after == kNobody ? top().id() : after;
  }

  // The record has its key, and is in no queue.
  void push(int32_t id) {
    const Entry entry = entry_of(id);
    if (!last_) return start(entry);
    Run& run = runs_[last_];
    if (entry < heads_[run.place].entry) {
      link(id, kNobody, run.head);
      records_[run.head].before = id;
      run.head = id;
      rise(run.place, {entry, last_});
    } else if (entry_of(run.tail) < entry) {
      link(id, run.tail, kNobody);
      records_[run.tail].after = id;
      run.tail = id;
    } else {
      start(entry);
    }
  }

  void remove(int32_t id) {
    Record& record = records_[id];
    const uint32_t at = record.run & ~kTag;
    const int32_t before = record.before, after = record.after;
    record.run = 0;
    record.before = record.after = 0;
    Run& run = runs_[at];
    if (after == kNobody)
      run.tail = before;
    else
      records_[after].before = before;
    if (before != kNobody) {
      records_[before].after = after;
    } else if (after != kNobody) {
      run.head = after;
      records_.fetch(records_[after].after == kNobody ? after : records_[after].after);
      sink(run.place, {entry_of(after), at});
    } else {
      end(at);
    }
  }

  // Members have new ids in the same order; their records have moved already.
  template <class NewId>
  void rename(const NewId& new_id) {
    const auto renamed = [&new_id](int32_t id) { return id == kNobody ? id : new_id(id); };
    for (Head& head : heads_) {
      head.entry = Entry(head.entry.key(), new_id(head.entry.id()));
      Run& run = runs_[head.run];
      run.head = new_id(run.head);
      run.tail = new_id(run.tail);
      for (int32_t id = run.head; id != kNobody; id = records_[id].after) {
        records_[id].before = renamed(records_[id].before);
        records_[id].after = renamed(records_[id].after);
      }
    }
  }

 private:
  static constexpr int32_t kNobody = -1;
  static constexpr size_t kArity = 4;
  struct Run {  // of one member or more
    int32_t head, tail;
    uint32_t place;  // of its head in the heap
  };
  struct Head {
    Entry entry;
    uint32_t run;
  };

  static size_t parent(size_t at) { return (at - 1) / kArity; }
  Entry entry_of(int32_t id) const { return {records_[id].key, id}; }

  void link(int32_t id, int32_t before, int32_t after) {
    Record& record = records_[id];
    record.run = last_ | kTag;
    record.before = before;
    record.after = after;
  }

  void start(const Entry& entry) {
    if (free_.empty()) {
      last_ = uint32_t(runs_.size());
      runs_.emplace_back();
    } else {
      last_ = free_.back();
      free_.pop_back();
    }
    runs_[last_] = {entry.id(), entry.id(), 0};
    link(entry.id(), kNobody, kNobody);
    heads_.push_back({entry, last_});
    rise(heads_.size() - 1, heads_.back());
  }

  void end(uint32_t run) {
    const size_t hole = runs_[run].place;
    free_.push_back(run);
    if (run == last_) last_ = 0;
    const Head moved = heads_.back();
    heads_.pop_back();
    if (hole == heads_.size()) return;
    if (hole && moved.entry < heads_[parent(hole)].entry)
      rise(hole, moved);
    else
      sink(hole, moved);
  }

  void put(size_t at, const Head& head) {
    heads_[at] = head;
    runs_[head.run].place = uint32_t(at);
  }

  void rise(size_t at, Head head) {
    for (; at && head.entry < heads_[parent(at)].entry; at = parent(at))
      put(at, heads_[parent(at)]);
    put(at, head);
  }

  void sink(size_t at, Head head) {
    for (;;) {
      const size_t first = at * kArity + 1;
      if (first >= heads_.size()) break;
      const size_t stop = std::min(first + kArity, heads_.size());
      size_t least = first;
      for (size_t child = first + 1; child < stop; ++child)
        if (heads_[child].entry < heads_[least].entry) least = child;
      if (!(heads_[least].entry < head.entry)) break;
      put(at, heads_[least]);
      at = least;
    }
    put(at, head);
  }

  ZeroArray<Record>& records_;
  std::vector<Run> runs_;  // [0] stands for no run
  std::vector<uint32_t> free_;
  std::vector<Head> heads_;
  uint32_t last_ = 0;  // the run that was pushed to last
};

}  // namespace kvell::memory
