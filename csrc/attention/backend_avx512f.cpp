// AVX-512 without bf16 dot products, or with slow ones: everything is multiplied as floats.
#include "backend.h"
#include "packed_avx512.h"

namespace {

using OverFloat32 = Float16Kernel<Float32>;

size_t scratch_bytes(const kvell::Call& call, int32_t max_rows) {
  return Lay<OverFloat32>::bytes(call, max_rows);
}

void run(const kvell::Call& call, const kvell::Task& task, void* scratch) {
  run_over_pool<Float16Kernel>(call, task, scratch);
}

void fold(const kvell::Call& call, const kvell::Fold& sections, void* scratch) {
  fold_tile<OverFloat32>(call, sections, scratch);
}

}  // namespace

const kvell::Backend* kvell::avx512f_backend() {
  static const Backend backend{"avx512f", scratch_bytes, run, ::fold};
  return &backend;
}
