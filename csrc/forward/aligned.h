// Memory of a thread for what it makes of rows and panels.
#pragma once
#include <cstdint>

namespace kvell {

// Memory that begins at a cache line; throws std::bad_alloc. These are functions of their own, not a
// std::vector in every unit: see csrc/cpu/kernels.cmake.
uint8_t* allocate_lines(int64_t bytes);
void free_lines(uint8_t* lines) noexcept;

}  // namespace kvell

namespace {

// Grows as needed and is kept until the thread ends. Growing forgets what was there.
class AlignedBytes {
 public:
  AlignedBytes() = default;
  ~AlignedBytes() { kvell::free_lines(lines_); }
  AlignedBytes(const AlignedBytes&) = delete;
  AlignedBytes& operator=(const AlignedBytes&) = delete;

  uint8_t* of(int64_t size) {
    if (size > bytes_) grow(size);
    return lines_;
  }

 private:
  void grow(int64_t size) {
    kvell::free_lines(lines_);
    lines_ = nullptr;
    bytes_ = 0;
    lines_ = kvell::allocate_lines(size);
    bytes_ = size;
  }

  uint8_t* lines_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace
