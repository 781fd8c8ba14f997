"""The pure half of the engine: commands and results in, step plans and events out."""
