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

// One slice per thread, a page apart at least, so that none shares a cache line. It is kept from
// call to call: memory fresh from the system costs a short call more than its arithmetic.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void make_room(size_t slice, int slices) {
    slice_bytes_ = (slice + 4095) / 4096 * 4096;
    const size_t wanted = slice_bytes_ * slices;
    if (wanted <= bytes_) return;
    std::free(data_);
    data_ = static_cast<uint8_t*>(std::aligned_alloc(4096, wanted));
    bytes_ = data_ ? wanted : 0;
    if (!data_) throw std::bad_alloc();
  }

  void* of_this_thread() const {
#ifdef _OPENMP
    return data_ + slice_bytes_ * omp_get_thread_num();
#else
    return data_;
#endif
  }

 private:
  uint8_t* data_ = nullptr;
  size_t slice_bytes_ = 0, bytes_ = 0;
};

void run(const Backend& backend, const Call& call, const Plan& plan) {
  int threads = plan.threads;
  const int64_t tasks = plan.tasks.size();
  if (tasks == 0 && plan.folds.empty()) return;
  if (tasks > 0 && tasks < threads) threads = int(tasks);
  thread_local Scratch of_caller;
  Scratch& scratch = of_caller;  // the same for all threads of the loop
  scratch.make_room(backend.scratch_bytes(call, plan.max_rows), threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < tasks; ++i) backend.run(call, plan.tasks[i], scratch.of_this_thread());
  // Few and short: one more barrier would cost more than it saves.
  for (const Fold& fold : plan.folds) backend.fold(call, fold, scratch.of_this_thread());
}

}  // namespace

void attend(const Backend& backend, const Call& call, int threads) {
  if (threads <= 0) threads = default_threads();
  run(backend, call, call.partials.starts ? make_partials_plan(call, threads) : make_plan(call, threads));
}

}  // namespace kvell
