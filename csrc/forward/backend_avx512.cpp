// AVX-512 with bf16 dot products.
#include "pairs_avx512.h"

const kvell::Kernels* kvell::avx512_forward(Element element) {
  return table_of<Pairs512, Floats512>("avx512", element);
}
