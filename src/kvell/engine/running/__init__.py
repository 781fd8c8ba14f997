"""The half of the engine that touches tensors: carries out a step plan."""
