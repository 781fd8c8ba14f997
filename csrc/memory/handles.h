// Something for each of a few whole numbers other than 0: what the many calls for one request
// begin with. Numbers in a row, as handles are, lie side by side, and none costs a division.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace kvell::memory {

template <class Value>
class HandleMap {
 public:
  HandleMap() : slots_(kFewest) {}

  Value* find(int32_t handle) {
    const size_t at = place(handle);
    return slots_[at].handle ? &slots_[at].value : nullptr;
  }
  const Value* find(int32_t handle) const {
    const size_t at = place(handle);
    return slots_[at].handle ? &slots_[at].value : nullptr;
  }
  // A handle that is not there.
  void insert(int32_t handle, Value value) {
    if (++count_ * 2 > slots_.size()) widen();
    slots_[place(handle)] = {handle, std::move(value)};
  }
  // A handle that is there.
  void erase(int32_t handle) {
    size_t hole = place(handle);
    // What lies behind moves up, unless that were before its own place.
    for (size_t at = next(hole); slots_[at].handle; at = next(at)) {
      if (distance(home(slots_[at].handle), at) < distance(hole, at)) continue;
      slots_[hole] = std::move(slots_[at]);
      hole = at;
    }
    slots_[hole] = {};
    --count_;
  }
  size_t size() const { return count_; }

 private:
  static constexpr size_t kFewest = 16;  // a power of two, as all sizes are
  struct Slot {
    int32_t handle = 0;  // 0: empty
    Value value{};
  };

  size_t home(int32_t handle) const { return uint32_t(handle) & (slots_.size() - 1); }
  size_t next(size_t at) const { return (at + 1) & (slots_.size() - 1); }
  size_t distance(size_t from, size_t to) const { return (to - from) & (slots_.size() - 1); }
  // Where it is, or would be put.
  size_t place(int32_t handle) const {
    size_t at = home(handle);
    while (slots_[at].handle && slots_[at].handle != handle) at = next(at);
    return at;
  }
  void widen() {
    std::vector<Slot> old(slots_.size() * 2);
    old.swap(slots_);
    for (Slot& slot : old)
      if (slot.handle) slots_[place(slot.handle)] = std::move(slot);
  }

  std::vector<Slot> slots_;  // at least half of them empty
  size_t count_ = 0;
};

}  // namespace kvell::memory
