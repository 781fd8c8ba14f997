"""Load on a server, as its clients make it, and what they see of it."""
