// AVX-512 with bf16 dot products.
#include "backend.h"
#include "packed_avx512.h"
#include "pairs_avx512.h"

namespace {

size_t scratch_bytes(const kvell::Call& call, int32_t max_rows) {
  return Lay<Float16Kernel<Float32>>::bytes(call, max_rows);  // the larger of the two
}

void run(const kvell::Call& call, const kvell::Task& task, void* scratch) {
  constexpr auto kPairs = kvell::Element::bfloat16;
  if (call.layer.element == kPairs && call.query.element == kPairs)
    return run_tile<PairKernel>(call, task, scratch);
  run_over_pool<Float16Kernel>(call, task, scratch);
}

void fold(const kvell::Call& call, const kvell::Fold& sections, void* scratch) {
  fold_tile<PairKernel>(call, sections, scratch);
}

}  // namespace

const kvell::Backend* kvell::avx512_backend() {
  static const Backend backend{"avx512", scratch_bytes, run, ::fold};
  return &backend;
}
