// Runs a plan over threads.
#include <cstdlib>
#include <memory>
#include <new>

#include "backend.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace kvell {
namespace {

int default_threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

// Scratch is one slice per thread, a page apart at least, so that none shares a cache line.
struct Scratch {
  Scratch(size_t slice, int slices) : slice_bytes((slice + 4095) / 4096 * 4096) {
    data = static_cast<uint8_t*>(std::aligned_alloc(4096, slice_bytes * slices));
    if (!data) throw std::bad_alloc();
  }
  ~Scratch() { std::free(data); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* of_this_thread() const {
#ifdef _OPENMP
    return data + slice_bytes * omp_get_thread_num();
#else
    return data;
#endif
  }
  size_t slice_bytes;
  uint8_t* data;
};

}  // namespace

void attend(const Backend& backend, const Call& call, int threads) {
  if (threads <= 0) threads = default_threads();
  const Plan plan = make_plan(call, threads);
  threads = plan.threads;
  const int64_t tasks = plan.tasks.size();
  if (tasks == 0 && plan.folds.empty()) return;
  if (tasks > 0 && tasks < threads) threads = int(tasks);
  const Scratch scratch(backend.scratch_bytes(call, plan.max_rows), threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < tasks; ++i) backend.run(call, plan.tasks[i], scratch.of_this_thread());
  // Few and short: one more barrier would cost more than it saves.
  for (const Fold& fold : plan.folds) backend.fold(call, fold, scratch.of_this_thread());
}

}  // namespace kvell
