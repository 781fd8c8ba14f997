"""JSON schemas and patterns: what they mean here, as pure rewriting of what clients send."""
