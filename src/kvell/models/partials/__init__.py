"""Sections that instances compute for each other's requests."""
