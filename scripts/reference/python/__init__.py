"""The Python reference: what is public, what its docstrings say, and its pages."""
