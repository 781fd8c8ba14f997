"""Rendering of chat templates, with a bound on the work of each."""
