"""Decode steps that a device records, as the engine uses them."""
