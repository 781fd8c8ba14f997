"""Roles, relief of memory and loans: decided once a second, for all fronts together.

::

    heartbeats ──► Steered … ──┐
                               ├─► Steering.decide ──► Orders(epoch, roles, moves)
    fronts' requests ──────────┘      of the manager, or of a front that has none

Who decides alone sees its own orders: of several that decide, each would send a request to the same
instance.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvell.cluster.routing.costs import ExecCosts
from kvell.cluster.steering.lending.planner import LoanPlanner
from kvell.cluster.steering.lending.views import LendingView
from kvell.cluster.steering.relief import MemoryView, MovableView, relief
from kvell.cluster.steering.roles import Role, RoleChanger, RoleView

LOOK_SECONDS = 1.0
"""Decisions are this far apart."""


@dataclass(frozen=True, slots=True)
class Steered:
    """An instance that serves, as its heartbeat and all fronts tell of it.

    :param part: what it does of the work; None: all of it.
    :param takes: whether it may go on with requests of others, or lend them memory.
    :param lending: what it said that loans are planned from; None: nothing yet.
    """

    memory: MemoryView
    part: RoleView | None = None
    takes: bool = True
    lending: LendingView | None = None

    @property
    def gives(self) -> bool:
        """Whether requests should leave it; those that compute prompts are left by themselves."""
        computes_prompts = self.part is not None and self.part.role == "prefill"
        return self.memory.is_short and not self.memory.leaving and not computes_prompts


@dataclass(frozen=True, slots=True)
class Move:
    """A request should go on at another instance, or a part of its pages should lie there.

    :param num_blocks: 0: all of it goes; else so many of its sections are lent by the target, which
        is the paper's ``move_kvcache`` (Infinite-LLM §6.2).
    """

    request_id: str
    source: str
    target: str
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Orders:
    """What instances and fronts should do.

    :param epoch: of who decided it.
    :param roles: instances, and the role that each has from now on; the others keep theirs.
    :param moves: of whole requests at most one from an instance, and one to it; of sections any
        number, and then none of the other kind.
    """

    epoch: int = 0
    roles: tuple[tuple[str, Role], ...] = ()
    moves: tuple[Move, ...] = ()


class Steering:
    """Beats in, orders out; pure.

    :param roles: changes roles by load; None: all keep theirs.
    :param settling_looks: after so many further looks a move shows in what fronts tell; until then
        neither instance of it is in another one.
    :param costs: of the instances' model, for loans.
    """

    def __init__(
        self,
        roles: RoleChanger | None = None,
        settling_looks: int = 0,
        costs: ExecCosts | None = None,
    ) -> None:
        self._roles, self._settling_looks = roles, settling_looks
        self._loans = LoanPlanner(costs or ExecCosts(), LOOK_SECONDS, settling_looks)
        self._next_seconds = -math.inf
        self._look = 0
        self._settles_at: dict[str, int] = {}

    @property
    def changes_roles(self) -> bool:
        """Whether it decides on roles, too, so that it is to be asked every second."""
        return self._roles is not None

    def is_due(self, now_seconds: float) -> bool:
        """Whether it is time to decide; asked with every heartbeat, before views are made."""
        return now_seconds >= self._next_seconds

    def decide(
        self,
        instances: Sequence[Steered],
        movable: Callable[[str], Sequence[MovableView]],
        now_seconds: float,
        epoch: int = 0,
    ) -> Orders:
        """Decide for the next second.

        :param movable: requests that could leave an instance, the oldest first; asked only of one
            that is short of memory while another has some.
        """
        self._next_seconds = now_seconds + LOOK_SECONDS
        self._look += 1
        roles: list[tuple[str, Role]] = []
        if self._roles is not None:
            parts = [one.part for one in instances if one.part is not None]
            roles = self._roles.decide(parts, now_seconds)
        return Orders(epoch, tuple(roles), tuple(self._moves(instances, movable)))

    def _moves(
        self, instances: Sequence[Steered], movable: Callable[[str], Sequence[MovableView]]
    ) -> list[Move]:
        """Whole requests that leave; where none has room elsewhere, sections of the longest."""
        if not any(one.gives for one in instances):
            return []
        self._settles_at = {k: at for k, at in self._settles_at.items() if at > self._look}
        moves = self._whole(instances, movable)
        moving = {name for move in moves for name in (move.source, move.target)}
        settled = self._look + 1 + self._settling_looks
        self._settles_at |= dict.fromkeys(moving, settled)
        for loan in self._loans.plan(instances, self._settles_at.keys()):
            moves.append(Move(loan.req_id, loan.source, loan.target, loan.num_blocks))
        return moves

    def _whole(
        self, instances: Sequence[Steered], movable: Callable[[str], Sequence[MovableView]]
    ) -> list[Move]:
        busy = self._settles_at.keys() | self._loans.parties
        free = [one for one in instances if one.memory.instance_id not in busy]
        short = [one.memory for one in free if one.gives]
        targets = [one.memory for one in free if one.takes and _may_take(one.memory)]
        targets.sort(key=lambda one: one.free_bytes)  # the last has most
        short.sort(key=lambda one: one.free_bytes)
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
            found = relief(source, [target], movable(source.instance_id))
            if found is not None:
                moves.append(Move(found[0], source.instance_id, found[1]))
                moving |= {source.instance_id, target.instance_id}
        return moves


def _may_take(one: MemoryView) -> bool:
    return not one.waiting and not one.coming
