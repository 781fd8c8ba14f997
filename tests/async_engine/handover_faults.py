"""Faults of two instances while a request of one is partly at the other, each proven."""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kvell.async_engine import AsyncEngine
from kvell.engine.protocol.statistics import Stats
from kvell.errors import InstanceDied, RequestFailed, TryLater
from kvell.fleet.fleet import MemberStatus
from kvell.front.request_log import LogEntry
from tests.async_engine.faults import Outcome as FaultOutcome
from tests.async_engine.faults import serving
from tests.async_engine.jobs import Job
from tests.front.scenarios import is_gone, until
from tests.front.seen import front_of

MOST_PAUSE_SECONDS = 0.5
MOST_DELAY_SECONDS = 0.02
"""A transfer takes about as long."""
LATER_SECONDS = 0.05
"""After which somebody who was turned away comes again."""
LOOK_SECONDS = 0.001
"""Between two looks for a transfer."""
MOST_STOPPED_SECONDS = 0.5
"""Far less than the silence after which the front gives an instance up."""

Victims = tuple[str, ...]
Pair = tuple[str, str, LogEntry]
"""The instance that has a request, the other, and the request."""


@dataclass
class Outcome(FaultOutcome):
    """What a run under faults of transfers or loans came to; wrong answers may be cut short.

    :ivar struck: by kind, requests whose transfer or loan a fault has prevented or held up.
    :ivar aborted: requests that their reader ended while an instance was stopped.
    :ivar acts: audits that saw an instance that had used a mechanism, by the mechanism.
    """

    struck: Counter[str] = field(default_factory=Counter)
    aborted: int = 0
    acts: Counter[str] = field(default_factory=Counter)


def moving(engine: AsyncEngine) -> list[Pair]:
    """Requests with a computed prompt that go from one instance that serves to another."""
    names = {one.instance_id for one in serving(engine)}
    submitted = front_of(engine).entries().in_flight
    return [
        (entry.line, entry.goes_to, entry)
        for entry in submitted
        if entry.line.startswith("prefill")
        and {entry.line, entry.goes_to} <= names
        and not entry.pending_prompt_tokens
    ]


def borrowing(engine: AsyncEngine) -> list[Pair]:
    names = {one.instance_id for one in serving(engine)}
    submitted = front_of(engine).entries().in_flight
    entries = {entry.request_id: entry for entry in submitted}
    return [
        (entries[part.req_id].line, part.inst_id, entries[part.req_id])
        for _, line in front_of(engine).instances()
        for part in line.placements
        if part.req_id in entries and {entries[part.req_id].line, part.inst_id} <= names
        if not part.local
    ]


def anywhere(engine: AsyncEngine) -> list[Pair]:
    names = {one.instance_id for one in serving(engine)}
    submitted = front_of(engine).entries().in_flight
    return [
        (entry.line, other, entry)
        for entry in submitted
        if entry.line in names
        for other in names - {entry.line}
    ]


def state_of(pid: int) -> str:
    """A process's state as Linux says it: T is stopped; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


async def stop(*pids: int) -> None:
    """SIGSTOP; the system runs no instruction of them after this."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        await until(lambda pid=pid: state_of(pid) == "T")  # type: ignore[misc]


async def wake(*pids: int) -> None:
    for pid in pids:
        assert state_of(pid) == "T", "it was given up"
        os.kill(pid, signal.SIGCONT)
        await until(lambda pid=pid: state_of(pid) != "T")  # type: ignore[misc]


async def asleep(pid: int, seconds: float) -> None:
    await stop(pid)
    await asyncio.sleep(seconds)
    await wake(pid)


class Faults:
    """Lets instances of one engine fail.

    :param find: the transfers or loans that are met.
    :param most_delay_seconds: from when one is seen to a fault in it, at most.
    :param most_stopped_seconds: how long one is stopped that wakes again, at most.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        chance: random.Random,
        outcome: Outcome,
        most_delay_seconds: float = MOST_DELAY_SECONDS,
        find: Callable[[AsyncEngine], list[Pair]] = moving,
        most_stopped_seconds: float = MOST_STOPPED_SECONDS,
    ) -> None:
        self._engine, self._chance, self._outcome = engine, chance, outcome
        self._find, self._most_stopped_seconds = find, most_stopped_seconds
        self._most_delay_seconds = most_delay_seconds

    async def strike(self, kind: str) -> None:
        """Wait for a transfer or a loan, let one or both of its sides fail, and wait for the proof.

        :param kind: a word of :data:`ACTS`, and the side: one of :data:`FIRST`, another, or "both".
        """
        first, second, entries = await self._pair()
        word, _, side = kind.partition(" ")
        one = (first,) if side in FIRST else (second,)
        sides = (first, second) if side == "both" else one
        attempts = {entry.request_id: entry.attempt for entry in entries}
        held_up = await ACTS[word](self, sides, (first, second), entries)
        prevented = sum(
            1
            for entry in entries
            if entry.attempt > attempts[entry.request_id] or entry.line == first  # it stayed
        )
        self._outcome.faults[kind] += 1
        self._outcome.struck[kind] += max(held_up, prevented)

    async def kill(self, sides: Victims, _pair: Victims, _entries: list[LogEntry]) -> int:
        await self._fail(sides, signal.SIGKILL)
        return 0

    async def hang(self, sides: Victims, _pair: Victims, _entries: list[LogEntry]) -> int:
        """SIGSTOP, until the front gives them up."""
        await self._fail(sides, signal.SIGSTOP)
        return 0

    async def pause(self, sides: Victims, pair: Victims, entries: list[LogEntry]) -> int:
        """SIGSTOP; a reader gives its request up meanwhile; then they wake."""
        pids = [self.pid_of(side) for side in sides]
        await stop(*pids)
        self._abort_one(entries)
        await asyncio.sleep(self._chance.uniform(0, self._most_stopped_seconds))
        held_up = sum(1 for entry in entries if entry.line == pair[0])
        await wake(*pids)
        return held_up

    async def orphan(self, sides: Victims, pair: Victims, entries: list[LogEntry]) -> int:
        """SIGSTOP of one; the other dies; then the first wakes, and its peer is no more."""
        [stopped] = sides
        pids = [self.pid_of(stopped)]
        await stop(*pids)
        self._abort_one(entries)
        await self._fail([one for one in pair if one != stopped], signal.SIGKILL)
        await wake(*pids)
        return 0

    async def _pair(self) -> tuple[str, str, list[LogEntry]]:
        """Both sides of a transfer or loan that is under way, at a random moment of it."""
        while True:
            while not self._find(self._engine):
                await asyncio.sleep(LOOK_SECONDS)
            if self._most_delay_seconds:
                await asyncio.sleep(self._chance.uniform(0, self._most_delay_seconds))
            if found := self._find(self._engine):
                first, second, _ = self._chance.choice(found)
                return first, second, [e for *sides, e in found if sides == [first, second]]

    async def _fail(self, names: Sequence[str], number: signal.Signals) -> None:
        """Send a signal to all of them at once; they are gone and started again after this."""
        before = [self.status(name) for name in names]
        for one in before:
            assert one.pid is not None
            os.kill(one.pid, number)
        for one in before:
            await until(lambda one=one: is_gone(one.pid))  # type: ignore[misc]
            await until(lambda one=one: self.status(one.instance_id).restarts > one.restarts)  # type: ignore[misc]

    def _abort_one(self, entries: list[LogEntry]) -> None:
        """The reader of one request ends it: its transfer is over for one side only."""
        if self._chance.random() < 0.5:
            self._engine.abort(str(self._chance.choice(entries).request_id))

    def pid_of(self, name: str) -> int:
        pid = self.status(name).pid
        assert pid is not None
        return pid

    def status(self, name: str) -> MemberStatus:
        [one] = [one for one in self._engine.instances() if one.instance_id == name]
        return one


Act = Callable[[Faults, Victims, Victims, list[LogEntry]], Awaitable[int]]
ACTS: dict[str, Act] = {
    "kill": Faults.kill,
    "hang": Faults.hang,
    "pause": Faults.pause,
    "orphaned": Faults.orphan,
}
FIRST = ("prefill", "debtor")
"""Names of the side that has the request."""
KINDS = [
    f"{word} {side}"
    for word in ACTS
    for side in ("prefill", "decode", "both")
    if (word, side) != ("orphaned", "both")
]
"""What happens, and to which side of a transfer."""
LENDING_KINDS = [kind.replace("prefill", "debtor").replace("decode", "creditor") for kind in KINDS]
"""The same, to the sides of a loan."""


async def disturbed(
    engine: AsyncEngine,
    jobs: Sequence[Job],
    kinds: Sequence[str],
    streams: int,
    seed: int,
    make: Callable[[AsyncEngine, random.Random, Outcome], Faults] = Faults,
) -> Outcome:
    """Keep so many streams busy while faults of these kinds happen, at random moments."""
    outcome, chance, over = Outcome(), random.Random(seed), asyncio.Event()
    faults = make(engine, chance, outcome)

    async def stream(number: int) -> None:
        own = random.Random(f"{seed}-{number}")
        while not over.is_set():
            await _one(engine, own.choice(jobs), outcome)

    async with asyncio.TaskGroup() as running:
        for number in range(streams):
            running.create_task(stream(number))
        for moment, kind in enumerate(kinds):
            await until(partial(outcome.has_load, moment))
            await asyncio.sleep(chance.uniform(0, MOST_PAUSE_SECONDS))
            await audited(engine, outcome)  # those that die now will report nothing later
            await faults.strike(kind)
            await audited(engine, outcome)
        over.set()
    await until(lambda: len(serving(engine)) == len(engine.instances()))
    return outcome


def check(outcome: Outcome, kinds: Sequence[str], refusals: Sequence[str]) -> None:
    """All faults happened, some met a transfer or a loan, and no answer is wrong.

    :param refusals: why an accepted request may get no answer.
    """
    print(  # noqa: T201
        f"{outcome.answered} answered, {outcome.aborted} aborted, {len(outcome.refused)} refused, "
        f"{outcome.turned_away} turned away, {len(outcome.wrong)} wrong; "
        f"{dict(outcome.faults)}, met: {dict(outcome.struck)}, acted: {dict(outcome.acts)}"
    )
    assert outcome.wrong == []
    assert outcome.faults.total() == len(kinds) and set(outcome.faults) == set(kinds)
    assert outcome.struck.total() > 0, "no fault has met a transfer or a loan"
    assert outcome.answered >= len(kinds), "there was load"
    assert outcome.unexpected(refusals) == []


async def audited(engine: AsyncEngine, outcome: Outcome) -> None:
    """No instance that serves contradicts itself; note what its mechanisms did."""
    while serving(engine):
        try:
            told = await engine.stats(with_audit=True)
        except (InstanceDied, TryLater):
            continue  # it is just ending, or was just woken
        assert {name: one.problems for name, one in told.items()} == dict.fromkeys(told, ())
        for one in told.values():
            outcome.acts.update(name for name, count in acts_of(one).items() if count)
        return


def acts_of(stats: Stats) -> dict[str, int]:
    """What an instance did in its present incarnation."""
    return {
        **stats.rungs,
        "lend": stats.sections.get("lent", 0),
        "borrow": stats.sections.get("borrowed", 0),
        "draft": stats.spec_decode_draft_tokens,
        "moved": stats.finished.get("moved", 0),
    }


def is_at_rest(stats: Stats) -> bool:
    counts = [group.used_pages for group in stats.groups]
    counts += [stats.buffer.get(name, 0) for name in ("holders", "parked")]
    counts += [stats.sections.get(side, 0) for side in ("lent", "borrowed")]
    return not any((*counts, stats.running, stats.waiting))


async def rested(engine: AsyncEngine) -> None:
    """Wait until no instance has a request or holds a page of pool or CPU buffer; what is cached
    stays."""
    while True:
        told = await engine.stats(with_audit=True)
        if all(map(is_at_rest, told.values())):
            assert set(told) == {one.instance_id for one in engine.instances()}
            assert all(one.problems == () for one in told.values())
            return
        await asyncio.sleep(0.01)


async def _one(engine: AsyncEngine, job: Job, outcome: Outcome) -> None:
    """Ask once, and count what comes of it."""
    tokens, reason = list[int](), ""
    try:
        async for output in engine.generate(job.prompt, job.sampling):
            assert output.token_ids[: len(tokens)] == tokens
            tokens, reason = output.token_ids, output.finish_reason or ""
    except RequestFailed as error:
        outcome.refused.append(str(error))
    except (InstanceDied, TryLater):  # not accepted: all are down at once, or nobody may lend
        outcome.turned_away += 1
        await asyncio.sleep(LATER_SECONDS)
        await until(lambda: bool(serving(engine)))
        return
    is_aborted = reason == "stop"
    outcome.aborted += is_aborted
    outcome.answered += reason == "length"
    right = job.tokens if reason == "length" else job.tokens[: len(tokens)]
    if tokens != right:
        outcome.wrong.append((job, tokens))
