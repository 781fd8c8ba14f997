// AVX-512 with bf16 dot products.
#include "backend.h"
#include "packed_avx512.h"
#include "pairs_avx512.h"

namespace {

size_t scratch_bytes(const kvell::Call& call, int32_t max_rows) {
  return Lay<Float16Kernel<Float32>>::bytes(call, max_rows);  // the larger of the two
}

void run(const kvell::Call& call, const kvell::Task& task, void* scratch) {
  using kvell::Element;
  switch (call.layer.element) {
    case Element::float32: return run_tile<Float16Kernel<Float32>>(call, task, scratch);
    case Element::bfloat16:
      return call.query.element == Element::bfloat16
                 ? run_tile<PairKernel>(call, task, scratch)
                 : run_tile<Float16Kernel<BFloat16>>(call, task, scratch);
    case Element::int8: return run_tile<Float16Kernel<Int8>>(call, task, scratch);
    case Element::float8: return run_tile<Float16Kernel<Float8>>(call, task, scratch);
  }
}

void fold(const kvell::Call& call, const kvell::Fold& sections, void* scratch) {
  fold_tile<PairKernel>(call, sections, scratch);
}

}  // namespace

const kvell::Backend* kvell::avx512_backend() {
  static const Backend backend{"avx512", scratch_bytes, run, ::fold};
  return &backend;
}
