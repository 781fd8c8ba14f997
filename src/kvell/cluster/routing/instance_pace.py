"""The prompts of one instance in time: how long they take, and how much of them is done."""

from dataclasses import dataclass
from math import exp, log
from typing import NamedTuple

from kvell.cluster.routing.pace import LEAST_SECONDS, Pace, PromptWork
from kvell.cost.prices import ExecCosts

WEIGHT = 0.2
"""Weight of the newest prompt."""
MOST_COMPUTING = 64
"""Larger numbers of computing instances count as this one."""
MOST_MISS = 0.5
"""Largest miss that counts, in logarithms: one prompt that waited for memory shows nothing."""


class CrowdTime(NamedTuple):
    """A moment, and the seconds before it with each number of computing instances."""

    at_seconds: float
    totals: tuple[float, ...]


class Crowd:
    """The instances of one host: how many of them compute, and how that slows each one.

    Prices are measured while one instance computes.  The slowdown is learnt for each number of
    computing instances; before any prompt shows it, that of the nearest number counts.
    """

    def __init__(self) -> None:
        self.computing = 0
        self._at_seconds: float | None = None
        self._totals = [0.0, 0.0]
        self._logs: dict[int, float] = {1: 0.0}

    def begin(self) -> None:
        """Note that an instance begins to compute; call :meth:`pass_to` before."""
        self.computing += 1

    def end(self) -> None:
        self.computing -= 1

    def time(self, now: float) -> CrowdTime:
        """Return the time ``now``; time passes up to it."""
        self.pass_to(now)
        return CrowdTime(now, tuple(self._totals))

    def pass_to(self, now: float) -> None:
        if self._at_seconds is not None:
            number = min(self.computing, MOST_COMPUTING)
            self._totals += [0.0] * (number + 1 - len(self._totals))
            self._totals[number] += max(0.0, now - self._at_seconds)
        self._at_seconds = now

    def slowdown(self, *, more: int = 0) -> float:
        """Return the seconds that a second of an instance's work takes now.

        :param more: number of further instances that begin now.
        """
        return exp(self._log(self.computing + more))

    def alone_seconds(self, since: CrowdTime, until: CrowdTime) -> float:
        spent = self._spent(since, until)
        return sum(seconds / exp(self._log(number)) for number, seconds in spent)

    def note(self, since: CrowdTime, until: CrowdTime, expected_seconds: float) -> None:
        """Learn from a prompt that was computed between two times.

        :param expected_seconds: its time without other instances; above 0.
        """
        spent = self._spent(since, until)
        whole = sum(seconds for _, seconds in spent)
        alone = self.alone_seconds(since, until)
        if alone < LEAST_SECONDS:
            return
        miss = max(-MOST_MISS, min(MOST_MISS, log(alone / expected_seconds)))
        for number, seconds in spent:
            if number > 1:
                learnt = self._log(number) + WEIGHT * seconds / whole * miss
                self._logs[number] = max(0.0, learnt)

    def _spent(self, since: CrowdTime, until: CrowdTime) -> list[tuple[int, float]]:
        """Return the seconds with each number of computing instances, at least one."""
        before = since.totals + (0.0,) * (len(until.totals) - len(since.totals))
        passed = [end - begin for begin, end in zip(before, until.totals, strict=True)]
        return [(max(1, number), seconds) for number, seconds in enumerate(passed) if seconds > 0]

    def _log(self, number: int) -> float:
        if number in self._logs:
            return self._logs[number]
        return self._logs[min(self._logs, key=lambda other: (abs(other - number), other))]


SHARED = 0.5
"""A prompt that was done in less than this part of its time shared a step with an earlier one."""


@dataclass(frozen=True)
class FirstToken:
    """When a request's first token comes.

    :param seconds: from now on.
    :param fetches: whether it waits for pages of another instance, and so shows no pace.
    """

    seconds: float
    work: PromptWork
    since: CrowdTime
    fetches: bool = False


class InstancePace:
    """An instance's pace among those of its host.

    :param pace: shared with instances of equal prices on the host.
    """

    def __init__(self, pace: Pace, crowd: Crowd) -> None:
        self.shared, self.crowd = pace, crowd
        self._computes = False
        self._began: CrowdTime | None = None

    @classmethod
    def alone(cls, costs: ExecCosts) -> "InstancePace":
        return cls(Pace(costs), Crowd())

    def seconds(self, work: PromptWork) -> float:
        return self.shared.seconds(work) * self.crowd.slowdown(more=not self._computes)

    def done_seconds(self, now: float) -> float:
        if self._began is None:
            return 0.0
        done = self.crowd.alone_seconds(self._began, self.crowd.time(now))
        return done * self.crowd.slowdown(more=not self._computes)

    def begin_prompts(self, now: float) -> None:
        self._began = self.crowd.time(now)

    def set_computing(self, computes: bool) -> None:
        if computes != self._computes:
            self._computes = computes
            (self.crowd.begin if computes else self.crowd.end)()

    def learn(self, predicted: FirstToken, now: float) -> None:
        """Learn from a prompt that was just done.

        Where several prompts wait, one has the instance from the end of the one before it.
        """
        if predicted.fetches:
            return
        since = predicted.since
        until = self.crowd.time(now)
        expected = self.shared.seconds(predicted.work)
        if self._began is not None and self._began.at_seconds > since.at_seconds:
            since = self._began
            if self.crowd.alone_seconds(since, until) < SHARED * expected:
                return
        self.crowd.note(since, until, expected)
        self.shared.note(predicted.work, self.crowd.alone_seconds(since, until))


FIRST_REQUESTS = 4
"""Requests that a new instance may have in flight before it has shown a first token."""


class Ramp:
    """A bound on the requests in flight of an instance that joins others which already serve.

    A new instance has the least load and the most free memory of all, so every policy that looks
    at load would send it all waiting requests before it is known to compute at all.  The bound
    grows by one with every first token of a request, and ends when it has reached the credits.

    :param credits: requests that the instance takes after its slow start.
    :ivar limit: most requests in flight; None once there is no bound any more.
    """

    def __init__(self, credits: int) -> None:  # noqa: A002 - the protocol's word
        self._credits = credits
        self.limit: int | None = FIRST_REQUESTS if credits > FIRST_REQUESTS else None

    def first_token(self) -> None:
        if self.limit is not None:
            grown = self.limit + 1
            self.limit = grown if grown < self._credits else None

    def allows(self, in_flight: int) -> bool:
        return self.limit is None or in_flight < self.limit
