"""Prompt trees: the prefixes that instances cache, by their notices (MemServe §6)."""
