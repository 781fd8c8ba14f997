"""The pages of an instance behind its pool, in host memory, and one lookup over both."""
