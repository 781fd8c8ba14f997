"""Duration of a step from its work; see README.md."""
