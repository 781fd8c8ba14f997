"""Flags of other systems, and what Kvell does with each."""
