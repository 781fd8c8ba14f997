"""One instance process: its start, its supervision and its restart."""
