"""Parts of the processes that compile grammars."""

from kvell.engine.requests.turns import EqualParts
from kvell.engine.sampling.grammars import Grammars


def use_parts(grammars: Grammars, most: int) -> None:
    """Let at most ``most`` grammars wait."""
    checks = grammars.checks
    checks.parts = EqualParts(most, "grammar", "grammars are waiting to be compiled")


def num_waiting(grammars: Grammars) -> int:
    return grammars.checks.parts.total
