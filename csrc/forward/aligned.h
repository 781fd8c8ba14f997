// Memory of a thread for what it makes of rows and panels.
#pragma once
#include <cstdint>
#include <vector>

namespace {

// It begins at a cache line.
class AlignedBytes {
 public:
  uint8_t* of(int64_t size) {
    bytes_.resize(size + 64);
    return bytes_.data() + (64 - reinterpret_cast<uintptr_t>(bytes_.data()) % 64) % 64;
  }

 private:
  std::vector<uint8_t> bytes_;
};

}  // namespace
