"""Roles, memory relief and loans: decided once a second, for all fronts together.

::

    reports of instances ──────┐
                               ├─► Steering.decide ──► Orders(epoch, roles, moves)
    fronts' requests ──────────┘      of the manager, or of a front that has none

Only one process decides, because several would each send a request to the same instance.

Instances change their roles if prompts or answers would be late and the other role has time.  A
role only decides what the front sends to an instance; the instance itself has none.  So one that
computes prompts continues with answers from the next request on, and nothing has to start.
Source: DESIGN §9; MemServe leaves the ratio to the operator.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from kvell.cluster.instance_load import InstanceLoad, Movable
from kvell.cluster.steering.lending.algorithm import Move
from kvell.cluster.steering.lending.planner import LoanPlanner
from kvell.cluster.steering.relief import DEFAULT_RELIEF, Relief, relief
from kvell.cost.prices import FIT_BATCH

Role = Literal["prefill", "decode"]
OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}
FALLING = 0.99
"""Work is falling if it is below this part of its average."""


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
    """The decisions about roles, from the front's counts; pure."""

    def __init__(self, rules: RoleRules | None = None) -> None:
        self._rules = rules or RoleRules()
        self._average: dict[Role, float] = {"prefill": 0.0, "decode": 0.0}
        self._looked_seconds: float | None = None
        self._late: Role | None = None
        self._late_since_seconds = 0.0
        self._rests_until_seconds = 0.0

    def decide(
        self, instances: Sequence[InstanceLoad], now_seconds: float
    ) -> list[tuple[str, Role]]:
        """Return the instances that should change, each with its new role.

        All of them get the same role.  Call this about once a second.

        :param instances: those that may get requests, without mixed ones.
        """
        sides: dict[Role, list[InstanceLoad]] = {
            role: [view for view in instances if view.role == role] for role in OTHER
        }
        work = {role: sum(view.work for view in side) for role, side in sides.items()}
        self._remember(work, now_seconds)
        late = self._late_role(work, sides) if all(sides.values()) else None
        if late != self._late:
            self._late, self._late_since_seconds = late, now_seconds
        is_early = now_seconds - self._late_since_seconds < self._rules.patience_seconds
        if late is None or is_early or now_seconds < self._rests_until_seconds:
            return []
        idlest = sorted(sides[OTHER[late]], key=lambda view: (view.work, view.instance_id))
        count = self._number(late, work, sides[late], idlest)
        if count:
            self._late = None
            self._rests_until_seconds = now_seconds + self._rules.rest_seconds
        return [(view.instance_id, late) for view in idlest[:count]]

    def _remember(self, work: dict[Role, int], now_seconds: float) -> None:
        before, self._looked_seconds = self._looked_seconds, now_seconds
        kept = 0.0
        if before is not None:
            kept = math.exp(-max(0.0, now_seconds - before) / self._rules.memory_seconds)
        for role, now in work.items():
            self._average[role] = kept * self._average[role] + (1 - kept) * now

    def _late_role(
        self, work: dict[Role, int], sides: dict[Role, list[InstanceLoad]]
    ) -> Role | None:
        """Return the later role, if it is late; falling work makes no role late."""
        lateness = {
            role: self._lateness(
                role, work[role], sum(self._price(role, view) for view in side), len(side)
            )
            for role, side in sides.items()
        }
        later: Role = max(OTHER, key=lambda role: lateness[role])
        gets_less = work[later] < FALLING * self._average[later]
        return None if lateness[later] < 1 or gets_less else later

    def _number(
        self, late: Role, work: dict[Role, int], has: list[InstanceLoad], idlest: list[InstanceLoad]
    ) -> int:
        """Return how many instances should change: the fewest that leave neither role late."""
        idler = OTHER[late]
        idlers_work = max(work[idler], self._average[idler])
        own = sum(self._price(late, view) for view in has)
        gained = accumulate((self._price(late, view) for view in idlest), initial=own)
        kept = [*accumulate(self._price(idler, view) for view in reversed(idlest))]
        then = [
            max(
                self._lateness(late, work[late], more, len(has) + count),
                self._lateness(idler, idlers_work, less, len(idlest) - count),
            )
            for count, (more, less) in enumerate(zip(gained, reversed(kept), strict=False))
        ]
        enough = [count for count, lateness in enumerate(then) if lateness <= self._rules.spare]
        if enough:
            return enough[0]
        best = min(range(len(then)), key=lambda count: then[count])
        return best if then[best] * self._rules.gain <= then[0] else 0

    def _price(self, role: Role, instance: InstanceLoad) -> float:
        costs = instance.report.facts.prices
        if role == "prefill":
            seconds = costs.token_seconds + costs.request_seconds / costs.chunk_tokens
            return seconds / self._rules.wait_seconds
        answers_seconds = max(0.0, FIT_BATCH * costs.output_token_seconds - costs.request_seconds)
        return answers_seconds / FIT_BATCH / costs.request_seconds / self._rules.slowdown

    def _lateness(self, role: Role, work: float, prices: float, instances: int) -> float:
        """Return the mean lateness of a role's instances, which share its work evenly.

        :param prices: sum of the prices of ``instances`` (≥ 1).
        """
        added = work / instances * (prices / instances)
        return added if role == "prefill" else added + 1 / self._rules.slowdown


LOOK_SECONDS = 1.0
"""Time between two decisions."""


@dataclass(frozen=True, slots=True)
class Orders:
    """The orders to instances and fronts.

    :param moves: an instance is in at most one move of a whole request, or else in any number of
        moves of sections.
    """

    epoch: int = 0
    roles: tuple[tuple[str, Role], ...] = ()
    moves: tuple[Move, ...] = ()


class Steering:
    """The decisions, from heartbeats and the beats of fronts; pure.

    :param roles: changes roles by load; None: all keep theirs.
    :param settling_looks: further looks until fronts report a move; until then neither of its
        instances is in another move.
    """

    def __init__(
        self,
        roles: RoleChanger | None = None,
        settling_looks: int = 0,
        moves: Relief = DEFAULT_RELIEF,
    ) -> None:
        self._roles, self._settling_looks = roles, settling_looks
        self._moves_requests = moves in ("all", "requests")
        self._lends = moves in ("all", "loans", "reactive")
        self._loans = LoanPlanner(LOOK_SECONDS, settling_looks, is_reactive=moves == "reactive")
        self._next_seconds = -math.inf
        self._look = 0
        self._settles_at: dict[str, int] = {}

    @property
    def changes_roles(self) -> bool:
        """Whether roles are decided too, so that a decision is needed every second."""
        return self._roles is not None

    def is_due(self, now_seconds: float) -> bool:
        """Return whether a decision is due; called for every heartbeat."""
        return now_seconds >= self._next_seconds

    def decide(
        self,
        instances: Sequence[InstanceLoad],
        movable: Callable[[str], Sequence[Movable]],
        now_seconds: float,
        epoch: int = 0,
    ) -> Orders:
        """Decide for the next second.

        :param movable: returns the requests that could leave an instance, the oldest first; called
            only for an instance that is short of memory while another has some.
        """
        self._next_seconds = now_seconds + LOOK_SECONDS
        self._look += 1
        roles: list[tuple[str, Role]] = []
        if self._roles is not None:
            parts = [instance for instance in instances if instance.role in OTHER]
            roles = self._roles.decide(parts, now_seconds)
        return Orders(epoch, tuple(roles), tuple(self._moves(instances, movable)))

    def _moves(
        self, instances: Sequence[InstanceLoad], movable: Callable[[str], Sequence[Movable]]
    ) -> list[Move]:
        self._settles_at = {k: at for k, at in self._settles_at.items() if at > self._look}
        moves = self._whole(instances, movable) if self._moves_requests else []
        moving = {name for move in moves for name in (move.source, move.target)}
        settled = self._look + 1 + self._settling_looks
        self._settles_at |= dict.fromkeys(moving, settled)
        if self._lends:
            moves += self._loans.plan(instances, self._settles_at.keys())
        return moves

    def _whole(
        self, instances: Sequence[InstanceLoad], movable: Callable[[str], Sequence[Movable]]
    ) -> list[Move]:
        busy = self._settles_at.keys() | self._loans.parties
        free = [instance for instance in instances if instance.instance_id not in busy]
        targets = [
            instance
            for instance in free
            if instance.can_take and not instance.waiting and not instance.num_coming
        ]
        targets.sort(key=lambda memory: memory.free_bytes)  # the last has most
        short = [  # requests leave prefill instances by themselves
            instance
            for instance in free
            if instance.role != "prefill" and instance.is_short and not instance.num_leaving
        ]
        short.sort(key=lambda memory: memory.free_bytes)
        moves: list[Move] = []
        moving: set[str] = set()
        for source in short:
            while targets and targets[-1].instance_id in moving:
                targets.pop()
            if not targets:
                break
            target = targets[-1]
            if source.instance_id in moving or target.free_bytes <= source.free_bytes:
                continue
            choice = relief(source, [target], movable(source.instance_id))
            if choice is not None:
                moves.append(Move(choice[0], source.instance_id, choice[1]))
                moving |= {source.instance_id, target.instance_id}
        return moves
