"""Which instance changes its role when prompts outweigh answers, or the other way round.

A role is what the front sends an instance, and nothing of the instance itself.  So one that
computes prompts goes on with answers from the next request on, and nothing has to start.
Source: DESIGN §9; MemServe leaves the ratio to whoever starts it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import Literal

Role = Literal["prefill", "decode"]
OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}


@dataclass(frozen=True, slots=True)
class RoleView:
    """An instance that does a part of the work.

    :param work: what it has still to do, in prompt tokens.
    """

    instance_id: str
    role: Role
    work: int


@dataclass(frozen=True)
class RoleRules:
    """When a role is changed.

    :param gain: the busier role's work per instance must fall by this factor.  The change back
        would raise it, so equal work never swings an instance to and fro.
    :param patience_seconds: for which that must have been so.
    :param rest_seconds: between two changes, until the first shows.
    :param memory_seconds: over which work is averaged, so that one long prompt changes nothing.
    :param least_work: prompt tokens per instance of the busier role; below, all is well.
    """

    gain: float = 1.25
    patience_seconds: float = 4.0
    rest_seconds: float = 12.0
    memory_seconds: float = 4.0
    least_work: int = 2_048


class RoleChanger:
    """Decides, from what the front counts; pure."""

    def __init__(self, rules: RoleRules | None = None) -> None:
        self._rules = rules or RoleRules()
        self._work: dict[Role, float] = {"prefill": 0.0, "decode": 0.0}
        self._looked_seconds: float | None = None
        self._wanted: Role | None = None
        self._wanted_since_seconds = 0.0
        self._rests_until_seconds = 0.0

    def decide(self, instances: Sequence[RoleView], now_seconds: float) -> tuple[str, Role] | None:
        """Return an instance and the role that it should have from now on; None: all stay.

        To be called every second or so.

        :param instances: those that may get requests; ones that do all of the work are not among
            them.
        :param now_seconds: of a clock that does not go back.
        """
        self._average(instances, now_seconds)
        wanted = self._better(instances)
        if wanted != self._wanted:
            self._wanted, self._wanted_since_seconds = wanted, now_seconds
        waited_seconds = now_seconds - self._wanted_since_seconds
        is_early = waited_seconds < self._rules.patience_seconds
        if wanted is None or is_early or now_seconds < self._rests_until_seconds:
            return None
        self._wanted, self._rests_until_seconds = None, now_seconds + self._rules.rest_seconds
        giving = [one for one in instances if one.role != wanted]
        idlest = min(giving, key=lambda one: (one.work, one.instance_id))
        return idlest.instance_id, wanted

    def _average(self, instances: Sequence[RoleView], now_seconds: float) -> None:
        """Take in the work of both roles; what was longer ago counts less."""
        before, self._looked_seconds = self._looked_seconds, now_seconds
        kept = 0.0
        if before is not None:
            kept = exp(-max(0.0, now_seconds - before) / self._rules.memory_seconds)
        for role in self._work:
            now = sum(one.work for one in instances if one.role == role)
            self._work[role] = kept * self._work[role] + (1 - kept) * now

    def _better(self, instances: Sequence[RoleView]) -> Role | None:
        """The role that one more instance would help most; None if that is not worth it."""
        counts = {role: sum(one.role == role for one in instances) for role in self._work}
        if not all(counts.values()):
            return None
        busier: Role = max(self._work, key=lambda role: self._work[role] / counts[role])
        idler = OTHER[busier]
        # Work must have been there for a while, and still be: a peak that is over needs nobody.
        now = {role: sum(one.work for one in instances if one.role == role) for role in counts}
        much, little = min(self._work[busier], now[busier]), max(self._work[idler], now[idler])
        most = much / counts[busier]
        if counts[idler] < 2 or most < self._rules.least_work:
            return None
        then = max(much / (counts[busier] + 1), little / (counts[idler] - 1))
        return busier if then * self._rules.gain <= most else None
