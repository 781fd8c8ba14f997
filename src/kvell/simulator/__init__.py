"""Simulator: traces drive the engine's own scheduler and memory core in virtual time."""
