"""A forward pass over pages by transformers' own modules."""
