"""The part of an engine core in the pool of instances; by itself, that of an engine alone."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvell.engine.lending.borrowing_requests import BorrowingRequests
from kvell.engine.moving.encoding import ArrivedRequest
from kvell.engine.protocol.messages import Cancel, Event, MigrationRefused, Submit
from kvell.engine.requests.plan import NewPages, StepPlan
from kvell.engine.requests.request import Request
from kvell.memory import Ints, Tokens
from kvell.mempool.entries import Draining, PeerEntry
from kvell.mempool.owners import Tick
from kvell.mempool.transfers.actions import Action
from kvell.vocabulary import StepNumber

Computes = Callable[[int, str, str, Callable[[int, int], Tokens]], None]
"""A function for the handle, the model, the cache root, and the tokens from a start to an end."""
NOTHING_LENT = dict.fromkeys(
    ("lent", "borrowed", "returned", "replaced", "shared", "lost", "loans", "loaned_bytes"), 0
)
NO_PAGES = np.empty((0, 2), np.int32)


class PoolNews(NamedTuple):
    """The requests that moved in the pool."""

    moved: Sequence[Request] = ()
    arrived: Sequence[ArrivedRequest] = ()


NO_NEWS = PoolNews()


class PoolPart:
    """The requests of one engine core that move, and the sections that they borrow.

    This one is of an engine that no other instance reaches: nothing moves, and nothing is lent.

    :ivar borrowed: the sections; None: there are none.
    """

    borrowed: BorrowingRequests | None = None

    def __init__(self) -> None:
        self._stays: list[Request] = []

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has begun that has not ended.

        A step then need not call :meth:`plan_borrows`, :meth:`on_planned`, :meth:`on_computed` and
        the methods that take what has piled up, and there is no deadline.
        """
        return not self._stays

    @property
    def num_idle(self) -> int:
        return 0

    @property
    def wants_fence(self) -> bool:
        return False

    @property
    def holds_pages(self) -> bool:
        return False

    @property
    def next_deadline(self) -> Tick | None:
        """The time at which a :class:`.Ticked` has something to do; None if there is none."""
        return None

    def watch_insertions(self, computes: Computes) -> None:
        """Report each text from another instance when it is cached."""

    def take_actions(self) -> list[Action]:
        return []

    def take_staying(self) -> list[Event]:
        """Return refusals for the requests that could not move since the last call."""
        stays, self._stays = self._stays, []
        return [MigrationRefused(r.request_id, r.attempt) for r in stays if r.finish_reason is None]

    def enter(self, request: Request, command: Submit) -> bool:
        """Register a new request; return whether it waits for other instances' answers."""
        return False

    def begin_migration(self, request: Request, target: str, *, rests: bool) -> None:
        """Begin to migrate a request in the middle of its answer, unless it moves anyway."""
        self._stays.append(request)

    def move_kvcache(self, request: Request, num_blocks: int, dst: str) -> str:
        """Plan to move sections of a request to a creditor; return why none can move, or ""."""
        return "no other instance reaches this one"

    def on_entry(self, entry: PeerEntry, *, is_owed_a_result: bool = False) -> PoolNews:
        """Process an entry of other instances, copies or time.

        :param is_owed_a_result: whether a step runs: no deadline expires before the next tick,
            since the step may read what a deadline takes.
        """
        if isinstance(entry, Draining):
            return NO_NEWS
        raise RuntimeError("this engine is not part of a pool of several instances")

    def plan_borrows(self, plan: StepPlan, rows: NewPages) -> StepPlan:
        """Return the plan with its remote reads; recall lent memory if the plan lacks memory."""
        return plan

    def on_planned(self, plan: StepPlan, requests: Sequence[Request]) -> tuple[int, ...]:
        """Offer the pages of requests whose announced text the plan completes, if that pays.

        Call it before the step runs, while no other step does; then call :meth:`take_actions`.

        :returns: numbers of the transfers that are pulled during the step.
        """
        return ()

    def on_computed(
        self, step: StepNumber, requests: Sequence[Request], *, rests: bool
    ) -> PoolNews:
        """Begin to move requests whose announced text a step has completed."""
        return NO_NEWS

    def on_missed(self, handles: Sequence[int]) -> None:
        """Let requests recompute the sections that they read too late at creditors."""

    def on_cancelled(self, command: Cancel) -> None:
        """Refuse a cancelled request that is still on its way here."""

    def on_ended(self, request: Request) -> None:
        """End the loans and transfers of a request that ends: no instance may read its pages."""

    def send_back(self, request: Request) -> None:
        """Send the text of a request that ended well to the instance that computed its prompt."""

    def sections(self) -> dict[str, int]:
        """Return the number of sections ``lent`` now, and :meth:`.BorrowingRequests.tally`.

        ``loans`` of sections were filled so far, with ``loaned_bytes`` copied to creditors.
        """
        return NOTHING_LENT

    @property
    def copies(self) -> tuple[int, bool]:
        """The number of sections copied to or from other instances, and whether more are now."""
        return 0, False

    def lent_pages(self) -> Ints:
        """Return the lent pages, int32 [pages, :class:`.PageRow`]."""
        return NO_PAGES
