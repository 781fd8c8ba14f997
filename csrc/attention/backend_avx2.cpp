// AVX2 and FMA.
#define KVELL_BACKEND_FUNCTION avx2_backend
#define KVELL_BACKEND_NAME "avx2"
#include "backend_vector.inl"
