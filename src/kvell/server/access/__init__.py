"""Access control: API keys, rate limits and bounds of bodies.  The key file is its only I/O."""
