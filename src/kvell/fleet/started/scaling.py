"""The instances that leave when the number of a role's instances changes; pure."""

from collections.abc import Sequence
from typing import NamedTuple

from kvell.fleet.instance.supervisor import InstanceState

RANKS: dict[InstanceState, int] = {"serving": 0, "starting": 3, "restarting": 3, "failing": 4}
"""States by how soon an instance in them serves, soonest first; others never do."""
UNSTABLE, QUIET = 1, 2
"""Ranks of instances that serve, perhaps not for long: their restarts were in vain, or they do not
answer."""
MOST_RESTARTS = 2
"""Restarts in vain of an instance that still counts as stable."""


class Candidate(NamedTuple):
    """An instance of a role that is not being drained.

    :param answers: whether it is connected and has sent something lately, if it serves.
    :param restarts_in_vain: the number of restarts since it last computed something.
    :param starting_seconds: age of the process that is being started; 0: there is none.
    """

    instance_id: str
    state: InstanceState
    answers: bool = True
    restarts_in_vain: int = 0
    starting_seconds: float = 0.0

    @property
    def rank(self) -> int:
        if self.state == "serving" and not self.answers:
            return QUIET
        if self.state == "serving" and self.restarts_in_vain > MOST_RESTARTS:
            return UNSTABLE
        return RANKS[self.state]


class Scaling(NamedTuple):
    """A change of the number of a role's instances.

    :param leaving: instances to drain; ``num_new``: the number to add.
    """

    leaving: frozenset[str]
    num_new: int


def scaling(candidates: Sequence[Candidate], count: int) -> Scaling:
    """Return the change that leaves ``count`` instances: those that serve, or will serve soonest.

    Of instances that are alike the youngest leave.  Failed ones are replaced.

    :param candidates: the instances of the role, the oldest first.
    """
    sound = [candidate for candidate in candidates if candidate.state in RANKS]
    by_use = sorted(sound, key=lambda candidate: (candidate.rank, -candidate.starting_seconds))
    staying = {candidate.instance_id for candidate in by_use[:count]}
    leaving = {candidate.instance_id for candidate in candidates} - staying
    return Scaling(frozenset(leaving), max(0, count - len(sound)))
