// Prints the sets of this processor, best first, as a CMake list: kernels.cmake compiles their forms.
#include <cstdio>

#include "cpu/features.h"

int main() {
  for (const char* name : kvell::processor_sets()) std::printf("%s;", name);
}
