"""The rules of each kind of layer group for the cache."""
