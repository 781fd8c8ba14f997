// y[rows, out] = x[rows, in] · Wᵀ + bias in bf16 with float32 sums, for few rows.
//
// With few rows the time is that of reading W from memory, so W is read once, in its own
// row-major layout, and prefetched. The sum of one output element runs over `in` in an
// order that depends on `in` alone, so neither rows nor threads change a bit of it.
#pragma once
#include <cstdint>

namespace kvell {

// W is contiguous. Strides are in elements, from row to row.
struct Linear {
  const uint16_t* weight;
  const uint16_t* bias;  // null if there is none
  const uint16_t* x;
  uint16_t* y;
  int64_t out, in, rows;
  int64_t x_stride, y_stride;
};

struct LinearBackend {
  const char* name;
  // Computes the output columns [begin, end) of all rows.
  void (*run)(const Linear& linear, int64_t begin, int64_t end);
};

const LinearBackend* portable_linear();
const LinearBackend* avx2_linear();
const LinearBackend* avx512_linear();

// What this build has and this processor can run, best first; null past the end.
const LinearBackend* linear_backend_at(int index);
// By name; null if unknown here.
const LinearBackend* linear_backend_named(const char* name);

// threads ≤ 0: OpenMP's number.
void run_linear(const LinearBackend& backend, const Linear& linear, int threads);

}  // namespace kvell
