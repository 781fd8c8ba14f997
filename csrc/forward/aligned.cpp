#include "aligned.h"

#include <cstdlib>
#include <new>

namespace kvell {

uint8_t* allocate_lines(int64_t bytes) {
  void* const lines = std::aligned_alloc(64, (size_t(bytes) + 63) / 64 * 64);
  if (!lines) throw std::bad_alloc();
  return static_cast<uint8_t*>(lines);
}

void free_lines(uint8_t* lines) noexcept { std::free(lines); }

}  // namespace kvell
