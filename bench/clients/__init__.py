"""Clients that others wrote, unchanged, against Kvell: which of their calls work."""
