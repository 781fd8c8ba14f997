"""The pages of an instance in host memory, and one lookup over them and the pool."""
