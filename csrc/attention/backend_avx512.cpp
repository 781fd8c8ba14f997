// AVX-512 with bf16 dot products.
#include "backend.h"
#include "pairs_avx512.h"

#include "floats.h"

namespace {

// Floats in 16 lanes; keys are transposed in registers.
struct Float16Kernel : FloatKernel<Avx512Lanes, Float32, 6, 4> {
  static void pack_keys(const Lay<Float16Kernel>& lay, SpanRows rows, SpanRows next) {
    transpose_span(lay.keys, lay.query_items, rows, next);
  }
};

bool is_float32(const kvell::Call& call) {
  return call.layer.element == kvell::Element::float32;
}

size_t scratch_bytes(const kvell::Call& call, int32_t max_rows) {
  return Lay<Float16Kernel>::bytes(call, max_rows);  // the larger of the two
}

void run(const kvell::Call& call, const kvell::Task& task, void* scratch) {
  is_float32(call) ? run_tile<Float16Kernel>(call, task, scratch)
                   : run_tile<PairKernel>(call, task, scratch);
}

void fold(const kvell::Call& call, const kvell::Fold& sections, void* scratch) {
  fold_tile<PairKernel>(call, sections, scratch);
}

}  // namespace

const kvell::Backend* kvell::avx512_backend() {
  static const Backend backend{"avx512", scratch_bytes, run, ::fold};
  return &backend;
}
