"""``kvell bench``."""
