"""Model descriptions from configs, weights from directories, and the forward pass over pages."""
