// AVX-512, and tile registers for what is multiplied in bf16.
#include "pairs_avx512.h"
#include "tiles_amx.h"

namespace {

struct TilePairs : Pairs512 {
  using Plain = TileWeights;
};

}  // namespace

const kvell::Kernels* kvell::amx_forward(Element element) {
  return table_of<TilePairs, Floats512>("amx", element);
}
