// A backend from the compiler's vector extension. The including unit names it:
// KVELL_BACKEND_FUNCTION and KVELL_BACKEND_NAME; its compile flags do the rest.
#include "backend.h"
#include "lanes_vector.h"

#include "floats.h"

namespace {

using OverFloat32 = FloatKernel<VectorLanes, Float32, 4, 2>;
using OverBFloat16 = FloatKernel<VectorLanes, BFloat16, 4, 2>;

bool is_float32(const kvell::Call& call) {
  return call.layer.element == kvell::Element::float32;
}

size_t scratch_bytes(const kvell::Call& call, int32_t max_rows) {
  return Lay<OverFloat32>::bytes(call, max_rows);
}

void run(const kvell::Call& call, const kvell::Task& task, void* scratch) {
  is_float32(call) ? run_tile<OverFloat32>(call, task, scratch)
                   : run_tile<OverBFloat16>(call, task, scratch);
}

void fold(const kvell::Call& call, const kvell::Fold& sections, void* scratch) {
  fold_tile<OverFloat32>(call, sections, scratch);
}

}  // namespace

const kvell::Backend* kvell::KVELL_BACKEND_FUNCTION() {
  static const Backend backend{KVELL_BACKEND_NAME, scratch_bytes, run, ::fold};
  return &backend;
}
