"""``kvell plan``."""
