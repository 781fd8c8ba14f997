"""The end of an instance, and whether one of its requests may have caused it."""

import signal
from dataclasses import dataclass
from typing import Literal

Cause = Literal["crash", "step", "killed", "cut", "hung", "protocol", "drained", "closing"]
"""The cause of an instance's end.  ``crash``: the process ended by itself; ``step``: a step failed
while the process lives; ``killed``: another process ended it; ``cut``: its connection ended for an
unknown reason; ``hung``: it sent nothing and was killed; ``protocol``: its message could
not be decoded; ``drained``: it was taken out of service; ``closing``: the front is shutting down.
"""
BLAMELESS: frozenset[Cause] = frozenset({"killed", "cut"})
"""Causes that no request of the instance is blamed for."""

SENT_BY_OTHERS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


@dataclass(frozen=True)
class InstanceDeath:
    """The end of one incarnation.

    :param problem: a sentence for logs and answers.
    """

    problem: str
    cause: Cause


def death_of(exit_code: int) -> InstanceDeath:
    """Return the death of a process with this exit status; a negative status is a signal."""
    problem = f"the instance process ended unexpectedly (exit {exit_code})"
    is_others = exit_code == 0 or -exit_code in SENT_BY_OTHERS
    return InstanceDeath(problem, "killed" if is_others else "crash")
