"""KV cache, activations and CPU buffer: the owners of memory, and the times of ownership."""
