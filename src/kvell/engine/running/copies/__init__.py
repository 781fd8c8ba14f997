"""A plan's copies of pages: their order, and whether they run before or during the pass."""
