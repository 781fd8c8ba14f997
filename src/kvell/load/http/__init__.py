"""The load generator's connections, and its checks and metrics of a server around a run."""
