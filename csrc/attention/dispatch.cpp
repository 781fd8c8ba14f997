// Chooses by what the processor says it can do.
#include <cstring>

#include "backend.h"

namespace kvell {
namespace {

bool has_avx512_bf16() {
#if defined(KVELL_HAS_AVX512)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

bool has_avx2() {
#if defined(KVELL_HAS_AVX2)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

}  // namespace

const Backend* backend_at(int index) {
#if defined(KVELL_HAS_AVX512)
  if (has_avx512_bf16() && index-- == 0) return avx512_backend();
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
