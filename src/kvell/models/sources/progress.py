"""How long-running work reports its progress."""

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction done, 0 to 1."""


def quiet(what: str, fraction: float) -> None:
    """Ignore progress."""
