// A heap of (key, id) whose members know their place: the exact minimum, removal from
// anywhere in O(log n), no stale entries. Ids are slots or large pages.
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

// `Record` holds the member's place; `kTag` marks which heap of several it is in.
template <class Record, uint32_t kTag = 0>
class PlacedHeap {
 public:
  explicit PlacedHeap(ZeroArray<Record>& records) : records_(records) {}

  bool empty() const { return entries_.empty(); }
  const Entry& top() const { return entries_.front(); }
  Key key_of(int32_t id) const { return entries_[(records_[id].place & ~kTag) - 1].key(); }

  void push(const Key& key, int32_t id) {
    entries_.emplace_back(key, id);
    rise(entries_.size() - 1, entries_.back());
  }

  // A member goes later than it did.
  void renew(const Key& key, int32_t id) { sink((records_[id].place & ~kTag) - 1, {key, id}); }

  // Members have new ids in the same order; their records have moved already.
  template <class NewId>
  void rename(const NewId& new_id) {
    for (Entry& entry : entries_) entry = Entry(entry.key(), new_id(entry.id()));
  }

  void remove(int32_t id) {
    const size_t hole = (records_[id].place & ~kTag) - 1;
    records_[id].place = 0;
    const Entry last = entries_.back();
    entries_.pop_back();
    if (hole == entries_.size()) return;
    if (hole && last < entries_[parent(hole)])
      rise(hole, last);
    else
      sink(hole, last);
  }

 private:
  static constexpr size_t kArity = 4;
  static size_t parent(size_t at) { return (at - 1) / kArity; }

  void put(size_t at, const Entry& entry) {
    entries_[at] = entry;
    records_[entry.id()].place = uint32_t(at + 1) | kTag;
  }

  void rise(size_t at, Entry entry) {
    for (; at && entry < entries_[parent(at)]; at = parent(at)) put(at, entries_[parent(at)]);
    put(at, entry);
  }

  void sink(size_t at, Entry entry) {
    for (;;) {
      const size_t first = at * kArity + 1;
      if (first >= entries_.size()) break;
      const size_t end = std::min(first + kArity, entries_.size());
      size_t least = first;
      for (size_t child = first + 1; child < end; ++child)
        if (entries_[child] < entries_[least]) least = child;
      if (!(entries_[least] < entry)) break;
      put(at, entries_[least]);
      at = least;
    }
    put(at, entry);
  }

  std::vector<Entry> entries_;
  ZeroArray<Record>& records_;
};

}  // namespace kvell::memory
