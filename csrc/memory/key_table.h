// Where what is named by a key is: keys lie in one array, so that a look is a miss of the caches at
// most, and those of many looks, known beforehand, can be fetched side by side.
#pragma once
#include <cstdint>
#include <utility>

#include "records.h"

namespace kvell::memory {

// Keys must be as good as random, and places above 0.
class KeyTable {
 public:
  KeyTable() : items_(kFirst) {}

  size_t size() const { return size_; }
  // The key is looked for soon.
  void fetch(uint64_t key) const { items_.fetch(key & mask_); }
  // Its place; 0 if it has none yet. It stays where it is until another is put in or taken out.
  uint32_t& operator[](uint64_t key) {
    if (2 * (size_ + 1) > mask_ + 1) grow();
    Item& item = items_[index_of(key)];
    if (!item.place) {
      item.key = key;
      ++size_;
    }
    return item.place;
  }
  // It has one.
  void erase(uint64_t key) {
    size_t hole = index_of(key);
    --size_;
    for (size_t at = (hole + 1) & mask_; items_[at].place; at = (at + 1) & mask_) {
      const size_t home = items_[at].key & mask_;
      if (((at - home) & mask_) < ((at - hole) & mask_)) continue;  // it is found without the hole
      items_[hole] = items_[at];
      hole = at;
    }
    items_[hole].place = 0;
  }

 private:
  static constexpr size_t kFirst = 1024;
  struct Item {  // all zero: nothing is here
    uint64_t key;
    uint32_t place;
  };

  size_t index_of(uint64_t key) const {
    size_t at = key & mask_;
    while (items_[at].place && items_[at].key != key) at = (at + 1) & mask_;
    return at;
  }
  void grow() {
    const size_t before = mask_ + 1;
    ZeroArray<Item> old(2 * before);
    std::swap(old, items_);
    mask_ = 2 * before - 1;
    for (size_t at = 0; at < before; ++at)
      if (old[at].place) items_[index_of(old[at].key)] = old[at];
  }

  ZeroArray<Item> items_;  // at most half of them taken
  size_t mask_ = kFirst - 1, size_ = 0;  // a power of two, less one
};

}  // namespace kvell::memory
