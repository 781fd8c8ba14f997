// Any processor.
#define KVELL_LINEAR_FUNCTION portable_linear
#define KVELL_LINEAR_NAME "portable"
#include "backend_vector.inl"
