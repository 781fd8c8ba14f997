// AVX2 and FMA.
#define KVELL_FORWARD_FUNCTION avx2_forward
#define KVELL_FORWARD_NAME "avx2"
#include "backend_vector.inl"
