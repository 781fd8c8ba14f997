"""What is cached, what counts as a hit, what to evict."""
