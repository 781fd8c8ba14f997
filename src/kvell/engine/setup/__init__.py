"""Setup of an engine: options, their checks, sizes, and the memory contract."""
