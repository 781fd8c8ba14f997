"""How long work says how far it is."""

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Told what is being done and which fraction of it, 0 to 1."""


def quiet(what: str, fraction: float) -> None:
    """Progress for those who do not look."""
