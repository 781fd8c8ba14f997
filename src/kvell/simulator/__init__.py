"""The virtual-time face: the engine's own scheduler and memory core, driven by traces."""
