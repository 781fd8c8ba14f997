// Chooses by what the processor says it can do, and splits the work over threads.
#include <algorithm>
#include <cstring>

#include "cpu/features.h"
#include "linear.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace kvell {
namespace {

// A share is a multiple of this many output columns, so that threads share few cache lines
// of y and no tile of W is cut.
constexpr int64_t kShareColumns = 32;

int default_threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

}  // namespace

const LinearBackend* linear_backend_at(int index) {
#if defined(KVELL_HAS_AVX512)
  if (has_avx512_bf16() && index-- == 0) return avx512_linear();
#endif
#if defined(KVELL_HAS_AVX2)
  if (has_avx2() && index-- == 0) return avx2_linear();
#endif
  return index == 0 ? portable_linear() : nullptr;
}

const LinearBackend* linear_backend_named(const char* name) {
  for (int i = 0; const LinearBackend* backend = linear_backend_at(i); ++i)
    if (std::strcmp(backend->name, name) == 0) return backend;
  return nullptr;
}

void run_linear(const LinearBackend& backend, const Linear& linear, int threads) {
  const int64_t shares = (linear.out + kShareColumns - 1) / kShareColumns;
  const int64_t workers = std::min<int64_t>(threads > 0 ? threads : default_threads(), shares);
  if (workers <= 1) return backend.run(linear, 0, linear.out);
#pragma omp parallel for schedule(static, 1) num_threads(int(workers))
  for (int64_t i = 0; i < workers; ++i)
    backend.run(linear, shares * i / workers * kShareColumns,
                std::min(shares * (i + 1) / workers * kShareColumns, linear.out));
}

}  // namespace kvell
