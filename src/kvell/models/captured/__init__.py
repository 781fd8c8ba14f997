"""Decode steps that a GPU records once and repeats: after it, only the memory of slots decides."""
