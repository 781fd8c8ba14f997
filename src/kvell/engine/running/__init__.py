"""The part of the engine that touches tensors: it runs step plans."""
