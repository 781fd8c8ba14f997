"""Which model families are served, by which code, and why the others are refused."""
