// Chooses by what the processor says it can do.
#include <cstring>

#include "cpu/features.h"
#include "kernels.h"

namespace kvell {

const Kernels* kernels_at(int index, Element element) {
#if defined(KVELL_HAS_AMX)
  if (has_amx_bf16() && index-- == 0) return amx_forward(element);
#endif
#if defined(KVELL_HAS_AVX512)
  if (has_quick_bf16_dots() && index-- == 0) return avx512_forward(element);
#endif
#if defined(KVELL_HAS_AVX512F)
  if (has_avx512() && index-- == 0) return avx512f_forward(element);
#endif
#if defined(KVELL_HAS_AVX512)
  if (has_avx512_bf16() && !has_quick_bf16_dots() && index-- == 0) return avx512_forward(element);
#endif
#if defined(KVELL_HAS_AVX2)
  if (has_avx2() && index-- == 0) return avx2_forward(element);
#endif
  return index == 0 ? portable_forward(element) : nullptr;
}

const Kernels* kernels_named(const char* name, Element element) {
  for (int i = 0; const Kernels* kernels = kernels_at(i, element); ++i)
    if (std::strcmp(kernels->name, name) == 0) return kernels;
  return nullptr;
}

}  // namespace kvell
