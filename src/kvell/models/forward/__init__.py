"""A step's batch and memory, and the forward pass over pages by transformers' own modules."""
