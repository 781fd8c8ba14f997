"""A model's storage and computation, from its config alone."""
