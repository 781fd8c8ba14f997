// What the processor says it can do, of the sets that kernels are compiled for.
#pragma once

#if defined(KVELL_HAS_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvell {

// Without bf16: Xeons since 2019.
inline bool has_avx512() {
#if defined(KVELL_HAS_AVX512F) || defined(KVELL_HAS_AVX512)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

inline bool has_avx512_bf16() {
#if defined(KVELL_EMULATE)
  return has_avx512();
#elif defined(KVELL_HAS_AVX512)
  return has_avx512() && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("avx512vbmi");
#else
  return false;
#endif
}

// AMD's multiply two pairs for each float; Intel's take as long as both floats, or longer, for
// which they have tiles (measured: docs/adr/0016-tile-registers.md).
inline bool has_quick_bf16_dots() { return has_avx512_bf16() && !__builtin_cpu_is("intel"); }

// Tiles of bf16, besides all of the above: a process has to ask Linux for their registers once.
inline bool has_amx_bf16() {
#if defined(KVELL_EMULATE)
  return has_avx512();
#elif defined(KVELL_HAS_AMX)
  static const bool granted = [] {
    constexpr long kAskForState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
    constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
    unsigned a = 0, b = 0, c = 0, d = 0;
    return has_avx512_bf16() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBf16) &&
           (d & kTiles) && syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
  }();
  return granted;
#else
  return false;
#endif
}

inline bool has_avx2() {
#if defined(KVELL_HAS_AVX2)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

}  // namespace kvell
