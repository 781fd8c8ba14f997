"""Parts of the processes that compile grammars."""

from kvell.engine.requests.turns import EqualParts
from kvell.engine.sampling.grammar_process.checking import GrammarChecks
from kvell.engine.sampling.grammar_process.processes import GrammarProcesses, GrammarTemplate
from kvell.engine.sampling.grammars import Grammars


def processes_of(grammars: Grammars) -> GrammarProcesses:
    """Return the processes that compile grammars."""
    return grammars.processes


def template_of(grammars: Grammars) -> GrammarTemplate | None:
    """Return the process from which workers are forked."""
    return processes_of(grammars).template


def checks_of(grammars: Grammars) -> GrammarChecks:
    """Return the checks of grammars."""
    return grammars.checks


def use_parts(grammars: Grammars, most: int) -> None:
    """Let at most ``most`` grammars wait."""
    checks = checks_of(grammars)
    checks.parts = EqualParts(most, "grammar", "grammars are waiting to be compiled")


def num_waiting(grammars: Grammars) -> int:
    """Return the number of grammars that wait to be compiled."""
    return checks_of(grammars).parts.total
