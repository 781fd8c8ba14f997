"""KV cache, activations and CPU buffer: who has which memory, and for how long."""
