"""Role changes of instances, if prompts or answers would be late and the other role has time.

A role only decides what the front sends to an instance; the instance itself has none.  So one that
computes prompts continues with answers from the next request on, and nothing has to start.
Source: DESIGN §9; MemServe leaves the ratio to the operator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import Literal, Protocol

from kvell.cluster.routing.costs import FIT_BATCH, ExecCosts

Role = Literal["prefill", "decode"]
OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}
FALLING = 0.99
"""Work is falling if it is below this part of its average."""


class RoleWork(Protocol):
    """An instance with a part of the work."""

    @property
    def instance_id(self) -> str:
        """Name of the instance."""
        ...

    @property
    def role(self) -> str:
        """The current role of the instance."""
        ...

    @property
    def work(self) -> int:
        """Remaining work: prompt tokens that a prefill instance still has to compute, or requests
        that a decode instance answers, where long ones count several times."""
        ...


@dataclass(frozen=True)
class RoleRules:
    """The conditions of role changes.

    A role is *late* while its work exceeds one of the first two values, where its lateness is 1.

    :param wait_seconds: time to compute all prompts of a prefill instance.
    :param slowdown: step of a decode instance, relative to one that only reads the weights.
    :param spare: lateness that neither role should exceed after a change.
    :param gain: if no change achieves that, factor by which it must lower the higher lateness.
    :param patience_seconds: time for which a role must have been late.
    :param rest_seconds: time between two changes, until the first one shows.
    :param memory_seconds: time over which work is averaged.
    """

    wait_seconds: float = 0.5
    slowdown: float = 2.0
    spare: float = 0.9
    gain: float = 1.25
    patience_seconds: float = 1.0
    rest_seconds: float = 12.0
    memory_seconds: float = 4.0


class RoleChanger:
    """The decisions about roles, from the front's counts; pure.

    :param costs: of the instances' model.
    """

    def __init__(self, rules: RoleRules | None = None, costs: ExecCosts | None = None) -> None:
        self._rules = rules or RoleRules()
        self._prices = _Prices(costs or ExecCosts(), self._rules)
        self._average: dict[Role, float] = {"prefill": 0.0, "decode": 0.0}
        self._looked_seconds: float | None = None
        self._late: Role | None = None
        self._late_since_seconds = 0.0
        self._rests_until_seconds = 0.0

    def decide(self, instances: Sequence[RoleWork], now_seconds: float) -> list[tuple[str, Role]]:
        """Return the instances that should change, each with its new role.

        All of them get the same role.  Call this about once a second.

        :param instances: those that may get requests, without mixed ones.
        :param now_seconds: of a monotonic clock.
        """
        work: dict[Role, int] = {
            role: sum(view.work for view in instances if view.role == role) for role in OTHER
        }
        self._remember(work, now_seconds)
        counts = {role: sum(view.role == role for view in instances) for role in OTHER}
        late = self._late_role(work, counts) if all(counts.values()) else None
        if late != self._late:
            self._late, self._late_since_seconds = late, now_seconds
        is_early = now_seconds - self._late_since_seconds < self._rules.patience_seconds
        if late is None or is_early or now_seconds < self._rests_until_seconds:
            return []
        giving = [view for view in instances if view.role != late]
        count = self._number(late, work, counts)
        if count:
            self._late = None
            self._rests_until_seconds = now_seconds + self._rules.rest_seconds
        idlest = sorted(giving, key=lambda view: (view.work, view.instance_id))
        return [(view.instance_id, late) for view in idlest[:count]]

    def _remember(self, work: dict[Role, int], now_seconds: float) -> None:
        """Average the work of both roles; older values count less."""
        before, self._looked_seconds = self._looked_seconds, now_seconds
        kept = 0.0
        if before is not None:
            kept = exp(-max(0.0, now_seconds - before) / self._rules.memory_seconds)
        for role, now in work.items():
            self._average[role] = kept * self._average[role] + (1 - kept) * now

    def _late_role(self, work: dict[Role, int], counts: dict[Role, int]) -> Role | None:
        """Return the later role, if it is late; falling work makes no role late."""
        lateness = {role: self._prices.lateness(role, work[role], counts[role]) for role in OTHER}
        later: Role = max(OTHER, key=lambda role: lateness[role])
        gets_less = work[later] < FALLING * self._average[later]
        return None if lateness[later] < 1 or gets_less else later

    def _number(self, late: Role, work: dict[Role, int], counts: dict[Role, int]) -> int:
        """Return how many instances should change: the fewest that leave neither role late."""
        idler = OTHER[late]
        idlers_work = max(work[idler], self._average[idler])
        then = [
            max(
                self._prices.lateness(late, work[late], counts[late] + count),
                self._prices.lateness(idler, idlers_work, counts[idler] - count),
            )
            for count in range(counts[idler])
        ]
        enough = [count for count, lateness in enumerate(then) if lateness <= self._rules.spare]
        if enough:
            return enough[0]
        best = min(range(len(then)), key=lambda count: then[count])
        return best if then[best] * self._rules.gain <= then[0] else 0


class _Prices:
    """Prices of the work of both roles in seconds, relative to the rules."""

    def __init__(self, costs: ExecCosts, rules: RoleRules) -> None:
        self._rules = rules
        self._token_seconds = costs.token_seconds + costs.request_seconds / costs.chunk_tokens
        self._step_seconds = costs.request_seconds
        measured_seconds = FIT_BATCH * costs.output_token_seconds
        self._answer_seconds = max(0.0, measured_seconds - self._step_seconds) / FIT_BATCH

    def lateness(self, role: Role, work: float, instances: int) -> float:
        """Return the lateness of a role's work, shared evenly by its instances (≥ 1)."""
        each = work / instances
        if role == "prefill":
            return each * self._token_seconds / self._rules.wait_seconds
        return (1 + each * self._answer_seconds / self._step_seconds) / self._rules.slowdown
