"""From a config to layer groups, from a directory to weights, and the forward pass over pages."""
