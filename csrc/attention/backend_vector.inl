// A backend from the compiler's vector extension. The including unit names it:
// KVELL_BACKEND_FUNCTION and KVELL_BACKEND_NAME; its compile flags do the rest.
#include "backend.h"
#include "lanes_vector.h"

#include "floats.h"

namespace {

using OverFloat32 = FloatKernel<VectorLanes, Float32, 4, 2>;

template <class Pool>
void run_over(const kvell::Call& call, const kvell::Task& task, void* scratch) {
  run_tile<FloatKernel<VectorLanes, Pool, 4, 2>>(call, task, scratch);
}

size_t scratch_bytes(const kvell::Call& call, int32_t max_rows) {
  return Lay<OverFloat32>::bytes(call, max_rows);
}

void run(const kvell::Call& call, const kvell::Task& task, void* scratch) {
  switch (call.layer.element) {
    case kvell::Element::float32: return run_over<Float32>(call, task, scratch);
    case kvell::Element::bfloat16: return run_over<BFloat16>(call, task, scratch);
    case kvell::Element::int8: return run_over<Int8>(call, task, scratch);
    case kvell::Element::float8: return run_over<Float8>(call, task, scratch);
  }
}

void fold(const kvell::Call& call, const kvell::Fold& sections, void* scratch) {
  fold_tile<OverFloat32>(call, sections, scratch);
}

}  // namespace

const kvell::Backend* kvell::KVELL_BACKEND_FUNCTION() {
  static const Backend backend{KVELL_BACKEND_NAME, scratch_bytes, run, ::fold};
  return &backend;
}
