// Whatever the compiler's default target offers: SSE2 on x86-64, NEON on arm64.
#define KVELL_BACKEND_FUNCTION portable_backend
#define KVELL_BACKEND_NAME "portable"
#include "backend_vector.inl"
