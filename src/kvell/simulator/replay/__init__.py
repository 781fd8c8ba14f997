"""A trace through the engine's own scheduler and memory core."""
