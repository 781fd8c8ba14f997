"""The load generator: clients of a server, and their measurements."""
