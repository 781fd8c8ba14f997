"""``kvell replay``."""
