"""The prefix cache: cached pages, hits and eviction."""
