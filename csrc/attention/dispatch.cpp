// Chooses by what the processor says it can do.
#include <cstring>

#include "backend.h"
#include "cpu/features.h"

namespace kvell {

const Backend* backend_at(int index) {
#if defined(KVELL_HAS_AMX)
  if (has_amx_bf16() && index-- == 0) return amx_backend();
#endif
#if defined(KVELL_HAS_AVX512)
  if (has_quick_bf16_dots() && index-- == 0) return avx512_backend();
#endif
#if defined(KVELL_HAS_AVX512F)
  if (has_avx512() && index-- == 0) return avx512f_backend();
#endif
#if defined(KVELL_HAS_AVX512)
  if (has_avx512_bf16() && !has_quick_bf16_dots() && index-- == 0) return avx512_backend();
#endif
#if defined(KVELL_HAS_AVX2)
  if (has_avx2() && index-- == 0) return avx2_backend();
#endif
  return index == 0 ? portable_backend() : nullptr;
}

const Backend* backend_named(const char* name) {
  for (int i = 0; const Backend* backend = backend_at(i); ++i)
    if (std::strcmp(backend->name, name) == 0) return backend;
  return nullptr;
}

}  // namespace kvell
