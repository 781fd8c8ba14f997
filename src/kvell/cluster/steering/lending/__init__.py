"""Loans: which instance holds which sections of which requests (gManager of Infinite-LLM)."""
