#include "model.h"

namespace kvell {
namespace {

constexpr int64_t kAlign = 128;

// Hands out runs of bytes one behind the other.
struct Cutter {
  uint8_t* at;
  int64_t used = 0;

  template <class T = void>
  T* take(int64_t bytes) {
    T* here = reinterpret_cast<T*>(at + used);
    used += (bytes + kAlign - 1) / kAlign * kAlign;
    return here;
  }
};

}  // namespace

Workspace::Workspace(const Decoder& decoder, int64_t tokens, int64_t rows, uint8_t* at) {
  Cutter cut{at};
  const int64_t size = decoder.element_size(), attended_size = decoder.heads * decoder.head_size;
  int64_t rotated = 0;
  for (const Rope& rope : decoder.ropes) rotated += 2 * int64_t(rope.frequencies.size());
  stream = cut.take<float>(tokens * decoder.hidden * 4);
  normed = cut.take(tokens * decoder.hidden * size);
  projected = cut.take<float>(tokens * decoder.projected() * 4);
  query = cut.take(tokens * attended_size * size);
  attended = cut.take(tokens * attended_size * size);
  inner = cut.take(tokens * decoder.intermediate * size);
  branch = cut.take<float>(tokens * decoder.hidden * 4);
  rotations = cut.take<float>(tokens * rotated * 4);
  mixed = cut.take<float>(tokens * decoder.mixer.mixed() * 4);
  gated = cut.take(tokens * decoder.mixer.inner() * size);
  rows_stream = cut.take<float>(rows * decoder.hidden * 4);
  rows_attended = cut.take(rows * attended_size * size);
  rows_gated = cut.take(rows * decoder.mixer.inner() * size);
  bytes = cut.used;
}

}  // namespace kvell
