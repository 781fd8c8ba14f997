"""Prefixes that instances cache, published for external routers as vLLM's KV events over ZeroMQ."""
