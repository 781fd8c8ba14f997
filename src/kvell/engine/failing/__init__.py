"""Steps and requests that fail: what ends, and what the others notice of it."""
