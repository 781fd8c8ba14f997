// Chooses by what the processor says it can do.
#include <cstring>

#include "backend.h"
#include "cpu/features.h"

namespace kvell {
namespace {

// The form for a set, or null if this build has none (csrc/cpu/kernels.cmake).
const Backend* form_of(const char* set) {
  const auto is = [set](const char* name) { return std::strcmp(set, name) == 0; };
#if defined(KVELL_HAS_AMX)
  if (is("amx")) return amx_backend();
#endif
#if defined(KVELL_HAS_AVX512)
  if (is("avx512")) return avx512_backend();
#endif
#if defined(KVELL_HAS_AVX512F)
  if (is("avx512f")) return avx512f_backend();
#endif
#if defined(KVELL_HAS_AVX2)
  if (is("avx2")) return avx2_backend();
#endif
  if (is("portable")) return portable_backend();
  return nullptr;
}

}  // namespace

const Backend* backend_at(int index) {
  for (const char* set : processor_sets())
    if (const Backend* form = form_of(set); form && index-- == 0) return form;
  return nullptr;
}

const Backend* backend_named(const char* name) {
  for (int i = 0; const Backend* backend = backend_at(i); ++i)
    if (std::strcmp(backend->name, name) == 0) return backend;
  return nullptr;
}

}  // namespace kvell
