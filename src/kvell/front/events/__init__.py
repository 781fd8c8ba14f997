"""What instances cache, published for routers outside: vLLM's KV events over ZeroMQ."""
