"""The loop around an engine core: the time before each input, and the pool's actions after it.

::

    commands, entries of the pool ──► EngineLoop ──► EngineCore ──► events
                                       │  ▲  └─── actions ───────► PoolIO ──────► other instances
                                 plan  ▼  │ result                   │
                                      runner                   time ─┘

The engine of a process and an instance in virtual time differ in what they connect to it: a runner
or a device, a clock, and a transport of pages.
"""

from collections.abc import Sequence

from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import (
    UNBOUNDED,
    Abandoned,
    CoreCommand,
    Entry,
    Journal,
    Outcome,
    PlanAsked,
    Warmed,
    apply,
    give,
)
from kvell.engine.core.lateness import Lateness
from kvell.engine.failing.failures import StepFailure
from kvell.engine.protocol.messages import Cancel, Event
from kvell.engine.requests.plan import StepPlan
from kvell.mempool.entries import PeerEntry, Ticked
from kvell.mempool.owners import TICK_MILLISECONDS, Tick
from kvell.mempool.transfers.actions import Action


class PoolIO:
    """The I/O of an engine's part in the pool of instances; this one is of an engine alone."""

    def now(self) -> Tick | None:
        """Return the milliseconds of the transport's clock; None: no time passes."""
        return None

    def do(self, actions: Sequence[Action], deadline: Tick | None) -> None:
        """Execute the agent's actions.

        Rights are granted and revoked immediately: the next plan may reuse their pages.

        :param deadline: when the agent must next receive the time; None: it need not.
        """


class EngineLoop:
    """The inputs of one engine core, in order; each is written down before the core acts on it."""

    def __init__(self, core: EngineCore, pages: PoolIO, journal: Journal | None = None) -> None:
        self.core, self._pages, self._journal = core, pages, journal
        self._tick: Tick = -TICK_MILLISECONDS
        self._is_quiet = False

    @property
    def deadline(self) -> Tick | None:
        """The time of which the core must be notified; None if there is none."""
        return self.core.pool.next_deadline

    def tell(self, command: CoreCommand) -> list[Event]:
        events = [] if isinstance(command, Cancel) else self.take_time()  # deadlines count from now
        self._write(command)
        events += give(command, self.core)
        self.act()
        return events

    def take(self, entry: PeerEntry) -> list[Event]:
        if isinstance(entry, Ticked):
            self._tick = entry.now
        self._write(entry)
        events = self.core.on_entry(entry)
        self.act()
        return events

    def take_time(self) -> list[Event]:
        now = self._pages.now()
        if now is None or now - self._tick < TICK_MILLISECONDS:
            return []
        return self.take(Ticked(now))

    def take_deadline(self) -> list[Event]:
        now = self._pages.now()
        deadline = self.deadline
        if now is None or deadline is None or deadline > now:
            return []
        return self.take(Ticked(now))

    def plan(self, question: PlanAsked = UNBOUNDED) -> StepPlan:
        if self._journal is not None:
            self._write(question)
        plan = self.core.plan(question.held, question.shared_prompt_tokens, question.undrafted)
        if plan.streams:  # the agent offers their pages before the step runs
            self.act()
        return plan

    def commit(self, outcome: Outcome) -> list[Event]:
        events = self.take_time()
        if self._journal is not None:
            self._write(outcome)
        if isinstance(outcome, StepFailure):
            events += self.core.fail(outcome)
        else:
            events += self.core.commit(outcome)
        if not (self._is_quiet and self.core.pool.is_quiet):
            self.act()
        return events

    def note(self, entry: Warmed | Lateness | Abandoned) -> None:
        """Pass an entry to the core that has no events."""
        self._write(entry)
        apply(entry, self.core)

    def act(self) -> None:
        actions = self.core.pool.take_actions()
        deadline = self.deadline
        self._is_quiet = not actions and deadline is None
        self._pages.do(actions, deadline)

    def _write(self, entry: Entry) -> None:
        if self._journal is not None:
            self._journal.entries.append(entry)
