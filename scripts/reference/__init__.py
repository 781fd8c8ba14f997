"""Builds the reference of Kvell's interfaces from the code: ``python -m scripts.reference``."""
