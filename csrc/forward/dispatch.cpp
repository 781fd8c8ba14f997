// Chooses by what the processor says it can do.
#include <cstring>

#include "cpu/features.h"
#include "kernels.h"

namespace kvell {
namespace {

// The form for a set, or null if this build has none (csrc/cpu/kernels.cmake).
const Kernels* form_of(const char* set, Element element) {
  const auto is = [set](const char* name) { return std::strcmp(set, name) == 0; };
#if defined(KVELL_HAS_AMX)
  if (is("amx")) return amx_forward(element);
#endif
#if defined(KVELL_HAS_AVX512)
  if (is("avx512")) return avx512_forward(element);
#endif
#if defined(KVELL_HAS_AVX512F)
  if (is("avx512f")) return avx512f_forward(element);
#endif
#if defined(KVELL_HAS_AVX2)
  if (is("avx2")) return avx2_forward(element);
#endif
  if (is("portable")) return portable_forward(element);
  return nullptr;
}

}  // namespace

const Kernels* kernels_at(int index, Element element) {
  for (const char* set : processor_sets())
    if (const Kernels* form = form_of(set, element); form && index-- == 0) return form;
  return nullptr;
}

const Kernels* kernels_named(const char* name, Element element) {
  for (int i = 0; const Kernels* kernels = kernels_at(i, element); ++i)
    if (std::strcmp(kernels->name, name) == 0) return kernels;
  return nullptr;
}

}  // namespace kvell
