// Memory of a step's attention, in what the caller lends: a slice for each thread, a page apart
// at least, so that none shares a line; then records of split contexts.
#pragma once
#include <cstdint>

#include "attention/records.h"

namespace kvell {

class Scratch {
 public:
  // Bytes of a slice for tasks of `slice_bytes`.
  static int64_t slice(int64_t slice_bytes) { return (slice_bytes + 4095) / 4096 * 4096; }

  Scratch(uint8_t* data, int64_t size_bytes, int64_t slice_bytes, int slices)
      : slice_bytes_(slice(slice_bytes)), data_(data), slices_bytes_(slice_bytes_ * slices) {
    records.at = reinterpret_cast<float*>(data + slices_bytes_);
    records.floats = (size_bytes - slices_bytes_) / 4;
  }

  bool fits() const { return records.floats >= 0; }
  void* of(int index) const { return data_ + slice_bytes_ * index; }
  int64_t used_bytes() const { return slices_bytes_ + 4 * records.used; }

  RecordSpace records{};

 private:
  int64_t slice_bytes_;
  uint8_t* data_;
  int64_t slices_bytes_;
};

}  // namespace kvell
