"""How an instance ended, and whether one of its requests may have done it."""

import signal
from dataclasses import dataclass
from typing import Literal

Cause = Literal["crash", "step", "killed", "cut", "hung", "protocol", "drained", "closing"]
"""``crash``: it ended by itself; ``step``: it lives on, but a step failed; ``killed``: somebody
ended it; ``cut``: the connection to it ended and nobody said why; ``hung``: it gave no sign of life
and was killed; ``protocol``: what it sent could not be read; ``drained``: it was taken out of
service; ``closing``: the front is shutting down."""
BLAMELESS: frozenset[Cause] = frozenset({"killed", "cut"})
"""None of its requests did it."""

SENT_BY_OTHERS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


@dataclass(frozen=True)
class InstanceDeath:
    """The end of one incarnation.

    :param problem: a sentence for logs and answers.
    """

    problem: str
    cause: Cause


def ended(exit_code: int) -> InstanceDeath:
    """The death of a process with this exit status; below 0 it is the signal that ended it."""
    problem = f"the instance process ended unexpectedly (exit {exit_code})"
    is_others = exit_code == 0 or -exit_code in SENT_BY_OTHERS
    return InstanceDeath(problem, "killed" if is_others else "crash")
