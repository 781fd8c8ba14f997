// A queue for each class of keys: within one the smallest key always goes first, and which class
// goes first changes with time (Evictor in tests/oracle/eviction/evictor.py). With one class it is its queue.
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
    const int32_t number = class_of(records_[id].key);
    fill_[number / 64] |= uint64_t(1) << number % 64;
    queues_[number].push(id);
    if (number == first_ || !is_first_known()) return;
    if (queues_[number].top().id() == id) consider(number);  // behind its head nothing changes
  }
  void remove(int32_t id) {
    --size_;
    const int32_t number = class_of(records_[id].key);
    RunQueue<Record, kTag>& queue = queues_[number];
    const bool led = number == first_ && queue.top().id() == id;
    queue.remove(id);
    if (queue.empty()) fill_[number / 64] &= ~(uint64_t(1) << number % 64);
    // What is left of other classes goes no sooner; what is left of this one may still go first.
    if (!led) return;
    if (!is_first_known() || queue.empty() || !(place_of(number) < others_)) first_ = kUnknown;
  }
  // The member that goes first; there is one.
  const Entry& top() const { return queues_[first()].top(); }
  // Where it stands.
  Place place() const { return place_of(first()); }
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
  static constexpr Place kLast{std::numeric_limits<int64_t>::max(), 0.0, 0, 0};
  struct Head {  // what a class' first key was worth when it was asked for last
    int64_t epoch = -1;
    uint64_t stamp = 0;
    double worth = 0.0;
  };

  bool is_first_known() const { return first_ != kUnknown && first_epoch_ == rule_.epoch(); }

  int32_t first() const {
    if (queues_.size() == 1) return 0;
    if (is_first_known()) return first_;
    first_ = kUnknown;
    first_epoch_ = rule_.epoch();
    others_ = kLast;
    for (size_t word = 0; word < kWords; ++word)
      for (uint64_t left = fill_[word]; left; left &= left - 1)
        consider(int32_t(word * 64) + __builtin_ctzll(left));
    return first_;
  }

  // Another class: does its head go first?
  void consider(int32_t number) const {
    Place place = place_of(number);
    if (first_ == kUnknown) {
      first_ = number;
      return;
    }
    const Place least = place_of(first_);
    if (goes_before(place, number, least, first_)) {
      first_ = number;
      place = least;
    }
    if (place < others_) others_ = place;
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
  mutable int32_t first_ = kUnknown;  // the class that goes first, if that is known
  mutable int64_t first_epoch_ = 0;
  mutable Place others_ = kLast;  // no head of another class goes before this
  std::array<uint64_t, kWords> fill_{};
  size_t size_ = 0;
};

}  // namespace kvell::memory
