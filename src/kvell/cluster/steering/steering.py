"""Roles, memory relief and loans: decided once a second, for all fronts together.

::

    reports of instances ──────┐
                               ├─► Steering.decide ──► Orders(epoch, roles, moves)
    fronts' requests ──────────┘      of the manager, or of a front that has none

Only one process decides, because several would each send a request to the same instance.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvell.cluster.steering.lending.planner import LoanParty, LoanPlanner, should_give
from kvell.cluster.steering.relief import (
    DEFAULT_RELIEF,
    MemoryPressure,
    MovableView,
    Relief,
    relief,
)
from kvell.cluster.steering.roles import OTHER, Role, RoleChanger, RoleWork

LOOK_SECONDS = 1.0
"""Time between two decisions."""


class SteeredInstance(LoanParty, RoleWork, Protocol):
    """A serving instance, by its heartbeat and the beats of all fronts."""


@dataclass(frozen=True, slots=True)
class Move:
    """A move of a request, or of a part of its pages, to another instance.

    :param num_blocks: 0: the whole request moves; else the target lends memory for this number of
        its sections, the paper's ``move_kvcache`` (Infinite-LLM §6.2).
    """

    request_id: str
    source: str
    target: str
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Orders:
    """The orders to instances and fronts.

    :param epoch: of the manager that decided.
    :param roles: instances that change, and their new roles.
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
    :param moves: the moves to decide on.
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
        instances: Sequence[SteeredInstance],
        movable: Callable[[str], Sequence[MovableView]],
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
        self, instances: Sequence[SteeredInstance], movable: Callable[[str], Sequence[MovableView]]
    ) -> list[Move]:
        """Return moves of whole requests and, if none has room elsewhere, of sections."""
        self._settles_at = {k: at for k, at in self._settles_at.items() if at > self._look}
        moves = self._whole(instances, movable) if self._moves_requests else []
        moving = {name for move in moves for name in (move.source, move.target)}
        settled = self._look + 1 + self._settling_looks
        self._settles_at |= dict.fromkeys(moving, settled)
        loans = self._loans.plan(instances, self._settles_at.keys()) if self._lends else []
        for loan in loans:
            moves.append(Move(loan.req_id, loan.source, loan.target, loan.num_blocks))
        return moves

    def _whole(
        self, instances: Sequence[SteeredInstance], movable: Callable[[str], Sequence[MovableView]]
    ) -> list[Move]:
        busy = self._settles_at.keys() | self._loans.parties
        free = [instance for instance in instances if instance.instance_id not in busy]
        targets = [instance for instance in free if instance.can_take and _may_take(instance)]
        targets.sort(key=lambda memory: memory.free_bytes)  # the last has most
        short = sorted(filter(should_give, free), key=lambda memory: memory.free_bytes)
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


def _may_take(memory: MemoryPressure) -> bool:
    return not memory.waiting and not memory.num_coming
