// Memory of a step's threads: one slice each, a page apart at least, so that none shares a line.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace kvell {

class Scratch {
 public:
  Scratch() = default;
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void reserve(size_t slice_bytes, int slices) {
    slice_bytes_ = (slice_bytes + 4095) / 4096 * 4096;
    data_ = static_cast<uint8_t*>(std::aligned_alloc(4096, slice_bytes_ * slices));
    if (!data_) throw std::bad_alloc();
  }
  void* of(int index) const { return data_ + slice_bytes_ * index; }

 private:
  size_t slice_bytes_ = 0;
  uint8_t* data_ = nullptr;
};

}  // namespace kvell
