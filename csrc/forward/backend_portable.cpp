// Any processor.
#define KVELL_FORWARD_FUNCTION portable_forward
#define KVELL_FORWARD_NAME "portable"
#include "backend_vector.inl"
