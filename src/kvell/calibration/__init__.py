"""Timing of the engine's own steps and fit of a cost model to them; see README.md."""
