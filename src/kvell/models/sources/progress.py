"""Progress reports of long-running work."""

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Receiver of the present work and the fraction done, 0 to 1."""


def quiet(what: str, fraction: float) -> None:
    """Ignore progress."""
