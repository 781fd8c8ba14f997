"""The journal: every input of an engine core, in order.  Its replay gives the same plans.

An input is a command, a request for a plan, a step's result or failure, newly committed memory of
the pool, lateness of requests, an entry of the agent, or an abandonment.  The core has no other
inputs, so the journal is complete, except for memory that a device refuses to map: in a replay it
refuses none.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvell.engine.core.core import EngineCore
from kvell.engine.core.lateness import Lateness
from kvell.engine.failing.failures import StepFailure
from kvell.engine.protocol.messages import (
    Cancel,
    Event,
    Migrate,
    MoveKvCache,
    ResetPrefixCache,
    Submit,
)
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.mempool.entries import PeerEntry
from kvell.vocabulary import RequestId


@dataclass(frozen=True)
class PlanAsked:
    """The loop asked for the next plan.

    :param shared_prompt_tokens: its most prompt tokens if several tenants have requests; None: no
        bound.
    """

    held: frozenset[RequestId] = frozenset()
    shared_prompt_tokens: int | None = None
    undrafted: frozenset[RequestId] = frozenset()


UNBOUNDED = PlanAsked()
"""The question for a plan of all requests, without a bound on prompts."""


@dataclass(frozen=True)
class Warmed:
    """The next ``chunks`` chunks of a shared pool have memory; 0: no more will."""

    chunks: int


@dataclass(frozen=True)
class Abandoned:
    """The loop dropped all requests and the cache, after an exception at an unknown place."""


Outcome = StepResult | StepFailure
CoreCommand = Submit | Cancel | Migrate | MoveKvCache | ResetPrefixCache
Entry = CoreCommand | PlanAsked | Abandoned | Outcome | Warmed | Lateness | PeerEntry


@dataclass
class Journal:
    """The inputs of an engine core.

    :param entries: in the order in which the core received them.
    """

    entries: list[Entry] = field(default_factory=list)


def give(command: CoreCommand, core: EngineCore) -> list[Event]:
    if isinstance(command, Submit):
        return core.submit(command)
    if isinstance(command, Cancel):
        return core.cancel(command)
    if isinstance(command, ResetPrefixCache):
        return core.forget_prefixes()
    return core.migrate(command) if isinstance(command, Migrate) else core.move_kvcache(command)


def apply(entry: Entry, core: EngineCore) -> list[Event] | StepPlan:
    if isinstance(entry, PlanAsked):
        return core.plan(entry.held, entry.shared_prompt_tokens, entry.undrafted)
    if isinstance(entry, CoreCommand):
        return give(entry, core)
    if isinstance(entry, StepResult):
        return core.commit(entry)
    if isinstance(entry, StepFailure):
        return core.fail(entry)
    if isinstance(entry, PeerEntry):
        return core.on_entry(entry)
    if isinstance(entry, Warmed):
        core.step_memory.warm(entry.chunks)
    elif isinstance(entry, Lateness):
        core.note(entry)
    else:
        core.abandon()
    return []


def replay(
    entries: Iterable[Entry], core: EngineCore, each: Callable[[EngineCore], None] | None = None
) -> list[StepPlan]:
    """Replay a journal in a fresh core; return its plans.  Call ``each`` after every entry."""
    plans: list[StepPlan] = []
    for entry in entries:
        outcome = apply(entry, core)
        if isinstance(outcome, StepPlan):
            plans.append(outcome)
        if each is not None:
            each(core)
    return plans
