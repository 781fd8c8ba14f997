// One instruction set's way of running tasks.
#pragma once
#include <cstddef>

#include "task.h"

namespace kvell {

struct Backend {
  const char* name;
  // Bytes of scratch a thread needs for tasks of at most `max_rows` rows.
  size_t (*scratch_bytes)(const Call& call, int32_t max_rows);
  void (*run)(const Call& call, const Task& task, void* scratch);
  // Folds the records of a unit's sections in order and writes the unit's result.
  void (*fold)(const Call& call, const Fold& fold, void* scratch);
};

const Backend* portable_backend();
const Backend* avx2_backend();
const Backend* avx512_backend();
const Backend* avx512f_backend();
const Backend* amx_backend();

// What this build has and this processor can run, best first; null past the end.
const Backend* backend_at(int index);
// By name; null if unknown here.
const Backend* backend_named(const char* name);

void write_kv(const Layer& layer, const int32_t* page_ids, const int32_t* offsets, int64_t tokens,
              const uint8_t* key, const int64_t* key_strides_bytes, const uint8_t* value,
              const int64_t* value_strides_bytes);

void attend(const Backend& backend, const Call& call, int threads);

}  // namespace kvell
