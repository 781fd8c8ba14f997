"""Public formats of traces, and the checks of their fields."""
