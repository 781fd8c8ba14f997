// AVX-512, and tile registers where pool and queries are bf16.
#include "backend.h"
#include "blocks_amx.h"

namespace {

size_t scratch_bytes(const kvell::Call& call, int32_t max_rows) {
  const size_t others = kvell::avx512_backend()->scratch_bytes(call, max_rows);
  const size_t tiles = Lay<TileKernel>::bytes(call, max_rows);
  return others > tiles ? others : tiles;
}

bool in_tiles(const kvell::Call& call) {
  return call.layer.element == kvell::Element::bfloat16 &&
         call.query.element == kvell::Element::bfloat16;
}

void run(const kvell::Call& call, const kvell::Task& task, void* scratch) {
  if (in_tiles(call)) return run_tile<TileKernel>(call, task, scratch);
  kvell::avx512_backend()->run(call, task, scratch);
}

void fold(const kvell::Call& call, const kvell::Fold& sections, void* scratch) {
  if (in_tiles(call)) return fold_tile<TileKernel>(call, sections, scratch);
  kvell::avx512_backend()->fold(call, sections, scratch);
}

}  // namespace

const kvell::Backend* kvell::amx_backend() {
  static const Backend backend{"amx", scratch_bytes, run, ::fold};
  return &backend;
}
