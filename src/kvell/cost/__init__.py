"""How long a step takes, from what it computes; see README.md."""
