"""Builds sdist and wheel, and tries them in a fresh environment: ``make check-packages``."""
