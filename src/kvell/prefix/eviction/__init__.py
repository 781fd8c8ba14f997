"""The eviction order of cached pages, and the protection of shared prefixes."""
