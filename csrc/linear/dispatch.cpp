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

// The form for a set, or null if this build has none (csrc/cpu/kernels.cmake).
const LinearBackend* form_of(const char* set) {
  const auto is = [set](const char* name) { return std::strcmp(set, name) == 0; };
#if defined(KVELL_HAS_AVX512)
  if (is("avx512")) return avx512_linear();
#endif
#if defined(KVELL_HAS_AVX2)
  if (is("avx2")) return avx2_linear();
#endif
  if (is("portable")) return portable_linear();
  return nullptr;
}

}  // namespace

const LinearBackend* linear_backend_at(int index) {
  for (const char* set : processor_sets())
    if (const LinearBackend* form = form_of(set); form && index-- == 0) return form;
  return nullptr;
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
