// Where what is named by a key is: keys lie in one array, so that a look is a miss of the caches at
// most, and those of many looks, known beforehand, can be fetched side by side.
#pragma once
#include <cstdint>
#include <vector>

namespace kvell::memory {

// Keys must be as good as random, and places above 0.
class KeyTable {
 public:
  // With room for so many.
  explicit KeyTable(size_t keys) : items_(items_for(keys)), mask_(items_.size() - 1) {}

  size_t size() const { return size_; }
  // The key is looked for soon.
  void fetch(uint64_t key) const { __builtin_prefetch(&items_[key & mask_], 1); }
  // Its place; 0 if it has none yet. It stays where it is until another is put in or taken out.
  uint32_t& operator[](uint64_t key) {
    if (2 * (size_ + 1) > items_.size()) grow();
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
  struct Item {
    uint64_t key = 0;
    uint32_t place = 0;  // 0: nothing is here
  };

  static size_t items_for(size_t keys) {
    size_t items = kFirst;
    while (items < 2 * (keys + 1)) items *= 2;
    return items;
  }
  size_t index_of(uint64_t key) const {
    size_t at = key & mask_;
    while (items_[at].place && items_[at].key != key) at = (at + 1) & mask_;
    return at;
  }
  void grow() {
    std::vector<Item> old(2 * items_.size());
    old.swap(items_);
    mask_ = items_.size() - 1;
    for (const Item& item : old)
      if (item.place) items_[index_of(item.key)] = item;
  }

  std::vector<Item> items_;  // a power of two, at most half of it taken
  size_t mask_, size_ = 0;
};

}  // namespace kvell::memory
