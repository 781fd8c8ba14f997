"""Copies of pages that a plan asks for: in which order, before the pass or under it."""
