"""What a model stores and computes, from its config alone."""
