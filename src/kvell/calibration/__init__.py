"""Times the engine's own steps and fits a cost model to them; see README.md."""
