"""Placement of the sections of a request that is longer than this instance's memory.

The front plans it with the request (:mod:`kvell.cluster.steering.placements`).  A creditor may
still refuse a section: then the next creditor is asked, and all of them again a little later.

A request that fits into this memory alone has a placement if not enough of it was free.  It needs
no creditor: once all have refused, or have what was planned, it goes on here.

Source: Infinite-LLM §6.2 (Listing 1).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kvell.engine.lending.distributed_request import DistributedRequest
from kvell.engine.protocol.messages import NotTaken
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.requests.request import Request
from kvell.mempool.owners import Tick
from kvell.vocabulary import RequestId

RETRY_TICKS: Tick = 500
"""Time after which creditors are asked again if all have refused."""
PATIENCE_TICKS: Tick = 20_000
MOST_PATIENCE_TICKS: Tick = 60_000
"""Time for which a blocked request waits for a creditor; then it is refused, to try later.

``MOST_PATIENCE_TICKS`` applies while all have refused fewer than ``ENOUGH_ROUNDS`` times, since
steps may take long.
"""
ENOUGH_ROUNDS = 8
PATIENCE_STEPS = 40
LONGEST_PATIENCE_TICKS: Tick = 300_000
"""With slow steps, the short requests that occupy a creditor's memory take long too.  A blocked
request then waits for ``PATIENCE_STEPS`` steps, but at most for this time."""
RIVAL_ROUNDS = 3
"""Rounds of refusals after which a blocked request gives way to a rival."""
GIVES_WAY = "another request borrows the memory that it needs"
NOBODY_LENDS = "it needs more memory than its instance has, and no other instance can lend any now"


@dataclass
class Placement:
    """The creditors of one request's sections; they outlast its pages here.

    :ivar planned: the creditor of each section that leaves, in order.
    :ivar creditors: all instances that may be asked, each once, in order.
    :ivar refused: creditors that have refused since all were last asked.
    :ivar rivals: those of them that borrow memory themselves.
    :ivar retry_at: time at which all are asked again; None while some have not refused.
    :ivar rounds: number of times that all have refused since the request last made progress.
    :ivar gives_up_at: time at which a blocked request is given up; None while it is not blocked.
    :ivar fits_here: whether the request could have all of its pages here.
    """

    request: Request
    planned: Sequence[str]
    creditors: list[str]
    refused: set[str] = field(default_factory=set)
    rivals: set[str] = field(default_factory=set)
    retry_at: Tick | None = None
    rounds: int = 0
    gives_up_at: Tick | None = None
    fits_here: bool = False

    @classmethod
    def of(cls, request: Request, entries: Sequence[RequestPlacementEntry]) -> "Placement":
        away = [entry for entry in entries if not entry.local]
        planned = [entry.inst_id for entry in away for _ in range(entry.num_blocks)]
        return cls(request, planned, list(dict.fromkeys(entry.inst_id for entry in away)))

    def creditor(self, section: int, now: Tick, without: str = "") -> str:
        """Return the instance to ask for a section next; "" if none is planned, or it is too soon.

        :param without: the creditor that recalls the section, which is not asked.
        """
        if section >= len(self.planned):
            return ""
        for name in (self.planned[section], *self.creditors):
            if name not in self.refused and name != without:
                return name
        if self.retry_at is None:
            self.retry_at = now + RETRY_TICKS
        return ""

    def refuses(self, creditor: str, *, borrows: bool = False) -> None:
        """Record that a creditor has refused, or is dead."""
        self.refused.add(creditor)
        if borrows:
            self.rivals.add(creditor)

    def grants(self) -> None:
        self.gives_up_at, self.rounds = None, 0

    def widen(self, creditor: str) -> None:
        if creditor not in self.creditors:
            self.creditors.append(creditor)
        self.refused.discard(creditor)

    def tick(self, now: Tick, *, is_asking: bool, step_ticks: Tick = 0) -> bool:
        """Advance the time; return whether to give up: all refused after the deadline."""
        if not self.request.is_held_up:
            self.grants()
        elif self.gives_up_at is None:
            steps_ticks = min(PATIENCE_STEPS * step_ticks, LONGEST_PATIENCE_TICKS)
            self.gives_up_at = now + max(PATIENCE_TICKS, steps_ticks)
        if self.retry_at is None or self.retry_at > now:
            return False
        refused_at = self.retry_at - RETRY_TICKS
        end_at = self.gives_up_at
        if end_at is not None and self.rounds < ENOUGH_ROUNDS:
            end_at += MOST_PATIENCE_TICKS - PATIENCE_TICKS
        self.refused.clear()
        self.rivals.clear()
        self.retry_at = None
        self.rounds += 1
        return not is_asking and end_at is not None and refused_at >= end_at


class Placements(dict[RequestId, Placement]):
    """The placements of one engine core's requests, in order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self._given_up: list[Request] = []
        self._behind: list[Request] = []

    def advance(
        self, now: Tick, asking: Collection[RequestId], instance: str, step_ticks: Tick
    ) -> None:
        """Advance the time.

        :param asking: requests whose creditors have not answered yet, or are pulling.
        """
        for name, placement in self.items():
            if placement.tick(now, is_asking=name in asking, step_ticks=step_ticks):
                self._given_up.append(placement.request)
        # Requests that two fronts placed at the same time may each wait for what the other holds.
        # Of two debtors the one whose name comes first goes on, of two requests of one debtor the
        # first; the others give their memory to rivals.
        stuck = [
            each
            for each in self.values()
            if each.gives_up_at is not None and each.rounds >= RIVAL_ROUNDS and not each.fits_here
        ]
        gives_way = any(min(each.rivals, default=instance) < instance for each in stuck)
        behind = [placement.request for placement in stuck[not gives_way :]]
        self._behind = [request for request in behind if request not in self._given_up]

    def take_given_up(self) -> list[tuple[Request, NotTaken]]:
        given_up: list[tuple[Request, NotTaken]] = [(request, "") for request in self._given_up]
        given_up += [(request, "rival") for request in self._behind]
        self._given_up = []
        self._behind = []
        return given_up

    @property
    def next_deadline(self) -> Tick | None:
        """The time at which creditors are asked again; None if none are."""
        times = (placement.retry_at for placement in self.values())
        return min((at for at in times if at is not None), default=None)

    def add(
        self,
        request: Request,
        entries: Sequence[RequestPlacementEntry],
        section_tokens: int,
        *,
        fits_here: bool,
    ) -> None:
        """Record the placement of a new request, and how much of it may be stored here.

        A request that has to stay here, and can, has none.

        :param fits_here: whether the request could have all of its pages here.
        """
        if fits_here and request.local_reason:
            return
        here = sum(entry.num_blocks for entry in entries if entry.local)
        request.local_tokens = here * section_tokens
        placement = self[request.request_id] = Placement.of(request, entries)
        placement.fits_here = fits_here

    def end_blocked(self, borrower: DistributedRequest) -> None:
        """End a placement that helps its request no further, which goes on here if it fits.

        Sections that are on their way to creditors are waited for first.
        """
        request = borrower.request
        placement = self.get(request.request_id)
        is_asking = len(borrower.sections) > borrower.away
        if placement is None or is_asking or not (placement.fits_here and request.is_held_up):
            return
        if placement.retry_at is not None or borrower.away >= len(placement.planned):
            del self[request.request_id]
            request.local_tokens = 0
