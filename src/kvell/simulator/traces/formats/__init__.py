"""Public formats of traces, and how their fields are read."""
