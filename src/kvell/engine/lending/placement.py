"""Where the sections of a request go that is longer than this instance's memory.

The front plans it with the request (:mod:`kvell.cluster.steering.placements`).  A creditor may
refuse a section all the same: then the next one is asked, and all of them again a little later.

Source: Infinite-LLM §6.2 (Listing 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.requests.request import Request
from kvell.mempool.owners import Tick

RETRY_TICKS: Tick = 500
"""After so long creditors are asked again that have all refused."""
PATIENCE_TICKS: Tick = 20_000
MOST_PATIENCE_TICKS: Tick = 60_000
"""How long a request that cannot go on waits for a creditor; then it is refused, to try later.

Up to the latter if they have refused less than ``ENOUGH_ROUNDS`` times, since steps take long.
"""
ENOUGH_ROUNDS = 8
PATIENCE_STEPS = 40
LONGEST_PATIENCE_TICKS: Tick = 300_000
"""Where steps take long, so do the short requests that a creditor's memory is waited for with: it
is given up after so many steps then, and after five minutes at last."""
NOBODY_LENDS = "it is longer than the memory of its instance, and no other has any to lend now"


@dataclass
class Placement:
    """Where the sections of one request go, whatever becomes of its pages here.

    :ivar planned: the creditor of each section that goes, in order.
    :ivar creditors: all that may be asked, each once, in order.
    :ivar refused: those that have refused since all were asked last.
    :ivar retry_at: when all are asked again; None while some have not refused.
    :ivar rounds: how often all have refused since it went on.
    :ivar gives_up_at: when a request that is held up is given up; None while it goes on.
    """

    request: Request
    planned: Sequence[str]
    creditors: list[str]
    refused: set[str] = field(default_factory=set)
    retry_at: Tick | None = None
    rounds: int = 0
    gives_up_at: Tick | None = None

    @classmethod
    def of(cls, request: Request, entries: Sequence[RequestPlacementEntry]) -> "Placement":
        """The placement of a request that has just come."""
        away = [entry for entry in entries if not entry.local]
        planned = [entry.inst_id for entry in away for _ in range(entry.num_blocks)]
        return cls(request, planned, list(dict.fromkeys(entry.inst_id for entry in away)))

    @property
    def _end_at(self) -> Tick | None:
        """When the request is given up, unless it goes on."""
        if self.gives_up_at is None or self.rounds >= ENOUGH_ROUNDS:
            return self.gives_up_at
        return self.gives_up_at + MOST_PATIENCE_TICKS - PATIENCE_TICKS

    def creditor(self, section: int, now: Tick, without: str = "") -> str:
        """The instance that is asked for a section next; "" if it is too early to ask anybody.

        :param without: one that is not asked, since it wants the section's pages back.
        """
        for name in (self.planned[section], *self.creditors):
            if name not in self.refused and name != without:
                return name
        if self.retry_at is None:
            self.retry_at = now + RETRY_TICKS
        return ""

    def refuses(self, creditor: str) -> None:
        """A creditor has refused, or is no more."""
        self.refused.add(creditor)

    def grants(self) -> None:
        """A creditor has granted room: the request goes on once its pages are there."""
        self.gives_up_at, self.rounds = None, 0

    def widen(self, creditor: str) -> None:
        """Let one more instance be asked, at once."""
        if creditor not in self.creditors:
            self.creditors.append(creditor)
        self.refused.discard(creditor)

    def tick(self, now: Tick, *, is_asking: bool, step_ticks: Tick = 0) -> bool:
        """Time has passed; returns whether the request is given up: all refused after its time.

        :param step_ticks: how long the instance's steps take.
        :param is_asking: whether a creditor still has to answer, or to fetch what it lends for.
        """
        if not self.request.is_held_up:
            self.grants()
        elif self.gives_up_at is None:
            steps_ticks = min(PATIENCE_STEPS * step_ticks, LONGEST_PATIENCE_TICKS)
            self.gives_up_at = now + max(PATIENCE_TICKS, steps_ticks)
        if self.retry_at is None or self.retry_at > now:
            return False
        refused_at, end_at = self.retry_at - RETRY_TICKS, self._end_at
        self.refused.clear()
        self.retry_at = None
        self.rounds += 1
        return not is_asking and end_at is not None and refused_at >= end_at
