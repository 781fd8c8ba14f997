// A queue for each class of keys: within one the smallest key always goes first, and which class
// goes first changes with time (Evictor in prefix/evictor.py). With one class it is its queue.
#pragma once
#include <array>

#include "eviction.h"
#include "queue.h"

namespace kvell::memory {

template <class Record, uint32_t kTag = 0>
class ClassQueue {
 public:
  ClassQueue(ZeroArray<Record>& records, const EvictionRule& rule)
      : records_(records), rule_(rule), heads_(rule.num_classes()) {
    for (int32_t i = 0; i < rule.num_classes(); ++i) queues_.emplace_back(records);
  }

  bool empty() const { return !size_; }

  void push(int32_t id) {
    ++size_;
    first_ = kUnknown;
    const int32_t number = class_of(records_[id].key);
    fill_[number / 64] |= uint64_t(1) << number % 64;
    queues_[number].push(id);
  }
  void remove(int32_t id) {
    --size_;
    first_ = kUnknown;
    const int32_t number = class_of(records_[id].key);
    queues_[number].remove(id);
    if (queues_[number].empty()) fill_[number / 64] &= ~(uint64_t(1) << number % 64);
  }
  // The member that goes first; there is one.
  const Entry& top() const { return queues_[first()].top(); }
  // Who is likely to be on top soon.
  int32_t next() const { return queues_[first()].next(); }

  // See RunQueue.
  template <class NewId>
  void rename(const NewId& new_id) {
    for (auto& queue : queues_) queue.rename(new_id);
  }

 private:
  static constexpr int32_t kUnknown = -1;
  static constexpr size_t kWords = (kClasses + 63) / 64;
  struct Head {  // what a class' first key was worth when it was asked for last
    int64_t epoch = -1;
    uint64_t stamp = 0;
    double worth = 0.0;
  };

  int32_t first() const {
    if (queues_.size() == 1) return 0;
    if (first_ != kUnknown && first_epoch_ == rule_.epoch()) return first_;
    int32_t found = -1;
    Place least{};
    for (size_t word = 0; word < kWords; ++word)
      for (uint64_t left = fill_[word]; left; left &= left - 1) {
        const int32_t number = int32_t(word * 64) + __builtin_ctzll(left);
        const Place place = place_of(number);
        if (found >= 0 && !goes_before(place, number, least, found)) continue;
        found = number;
        least = place;
      }
    first_epoch_ = rule_.epoch();
    return first_ = found;
  }

  bool goes_before(const Place& a, int32_t of_a, const Place& b, int32_t of_b) const {
    if (a < b) return true;
    return !(b < a) && queues_[of_a].top().id() < queues_[of_b].top().id();
  }

  Place place_of(int32_t number) const {
    const Entry& top = queues_[number].top();
    Head& head = heads_[number];
    if (head.epoch != rule_.epoch() || head.stamp != top.stamp)
      head = {rule_.epoch(), top.stamp, rule_.worth(top.key())};
    const Key key = top.key();
    return {rank_of(key), head.worth, time_of(key), key.shortness};
  }

  ZeroArray<Record>& records_;
  const EvictionRule& rule_;
  std::vector<RunQueue<Record, kTag>> queues_;
  mutable std::vector<Head> heads_;
  mutable int32_t first_ = kUnknown;  // the class that goes first, while nothing changes
  mutable int64_t first_epoch_ = 0;
  std::array<uint64_t, kWords> fill_{};
  size_t size_ = 0;
};

}  // namespace kvell::memory
