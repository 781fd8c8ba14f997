"""Figures of a replay, and its pictures."""
