// Copies new K and V rows into their pages.
#include <cstring>

#include "backend.h"

namespace kvell {
namespace {

constexpr int64_t kParallelBytes = 1 << 20;  // below this a second thread costs more than it saves

}  // namespace

void write_kv(const Layer& layer, const int32_t* page_ids, const int32_t* offsets, int64_t tokens,
              const uint8_t* key, const int64_t* key_strides_bytes, const uint8_t* value,
              const int64_t* value_strides_bytes) {
  const int64_t row_bytes = layer.row_bytes(), head_bytes = layer.head_bytes();
  const int64_t value_offset = layer.value_offset_bytes();
  const bool parallel = 2 * tokens * layer.kv_heads * row_bytes > kParallelBytes;
#pragma omp parallel for schedule(static) if (parallel)
  for (int64_t token = 0; token < tokens; ++token) {
    uint8_t* row = layer.page(page_ids[token]) + offsets[token] * row_bytes;
    for (int32_t head = 0; head < layer.kv_heads; ++head, row += head_bytes) {
      std::memcpy(row, key + token * key_strides_bytes[0] + head * key_strides_bytes[1], row_bytes);
      if (value_offset > 0)
        std::memcpy(row + value_offset,
                    value + token * value_strides_bytes[0] + head * value_strides_bytes[1], row_bytes);
    }
  }
  (void)parallel;
}

}  // namespace kvell
