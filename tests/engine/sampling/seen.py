"""Parts of the processes that compile grammars."""

from kvell.engine.sampling.grammar_process.checking import GrammarChecks
from kvell.engine.sampling.grammar_process.processes import GrammarProcesses, _Template
from kvell.engine.sampling.grammars import Grammars


def processes_of(grammars: Grammars) -> GrammarProcesses:
    """Return the processes that compile grammars."""
    return grammars._processes


def template_of(grammars: Grammars) -> _Template | None:
    """Return the process from which workers are forked."""
    return processes_of(grammars)._template


def checks_of(grammars: Grammars) -> GrammarChecks:
    """Return the checks of grammars."""
    return grammars._checks
