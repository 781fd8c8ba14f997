// A backend from the compiler's vector extension. The including unit names it:
// KVELL_BACKEND_FUNCTION and KVELL_BACKEND_NAME; its compile flags do the rest.
#include "backend.h"
#include "lanes_vector.h"

#include "floats.h"

namespace {

template <class Pool>
using Over = FloatKernel<VectorLanes, Pool, 4, 2>;

size_t scratch_bytes(const kvell::Call& call, int32_t max_rows) {
  return Lay<Over<Float32>>::bytes(call, max_rows);
}

void run(const kvell::Call& call, const kvell::Task& task, void* scratch) {
  run_over_pool<Over>(call, task, scratch);
}

void fold(const kvell::Call& call, const kvell::Fold& sections, void* scratch) {
  fold_tile<Over<Float32>>(call, sections, scratch);
}

}  // namespace

const kvell::Backend* kvell::KVELL_BACKEND_FUNCTION() {
  static const Backend backend{KVELL_BACKEND_NAME, scratch_bytes, run, ::fold};
  return &backend;
}
