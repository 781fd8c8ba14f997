// The instruction sets of this processor, of those that kernels are written for. A build may lack the form
// of a set: dispatch.cpp of each module knows which forms it has.
#pragma once

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvell {

#if defined(__x86_64__)

// Without bf16: Xeons since 2019.
inline bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
}

inline bool has_avx512_bf16() {
#if defined(KVELL_EMULATE)
  return has_avx512();
#else
  return has_avx512() && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("avx512vbmi");
#endif
}

// AMD's multiply two pairs for each float; Intel's take as long as both floats, or longer, for
// which they have tiles (measured: docs/adr/0016-tile-registers.md).
inline bool has_quick_bf16_dots() { return has_avx512_bf16() && !__builtin_cpu_is("intel"); }

// Tiles of bf16, besides all of the above: a process has to ask Linux for their registers once.
inline bool has_amx_bf16() {
#if defined(KVELL_EMULATE)
  return has_avx512();
#elif defined(__linux__)
  constexpr long kAskForState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return has_avx512_bf16() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBf16) &&
         (d & kTiles) && syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
#else
  return false;
#endif
}

inline bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

#endif

// Names of the sets that this processor runs, best first; "portable", which every processor runs, is last.
struct ProcessorSets {
  const char* names[6] = {};
  int count = 0;

  const char* const* begin() const { return names; }
  const char* const* end() const { return names + count; }
};

inline const ProcessorSets& processor_sets() {
  static const ProcessorSets sets = [] {
    ProcessorSets found;
    const auto add = [&](const char* name, bool has) {
      if (has) found.names[found.count++] = name;
    };
#if defined(__x86_64__)
    add("amx", has_amx_bf16());
    add("avx512", has_quick_bf16_dots());
    add("avx512f", has_avx512());
    add("avx512", has_avx512_bf16() && !has_quick_bf16_dots());
    add("avx2", has_avx2());
#endif
    add("portable", true);
    return found;
  }();
  return sets;
}

}  // namespace kvell
