"""Load on a server as clients generate it, and what they measure."""
