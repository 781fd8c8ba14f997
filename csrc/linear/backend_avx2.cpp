// AVX2 and FMA.
#define KVELL_LINEAR_FUNCTION avx2_linear
#define KVELL_LINEAR_NAME "avx2"
#include "backend_vector.inl"
