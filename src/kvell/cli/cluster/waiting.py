"""Waits until a server has what was asked for."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvell.cli.cluster.state import Answer, Cluster, Instance
from kvell.clock import Clock
from kvell.errors import KvellError, TryLater

POLL_SECONDS = 0.5
SERVING, FAILED = "serving", "failed"


class Goal(Protocol):
    """What is waited for."""

    def lacking(self, cluster: Cluster) -> str:
        """Return what is not so yet, in words; empty when it is so."""
        ...

    def hopeless(self, cluster: Cluster) -> str:
        """Return why it will never be so, in words; empty while it may."""
        ...


@dataclass(frozen=True)
class Scaled:
    """Each role has so many instances that serve, and no others: none that start or drain."""

    counts: Mapping[str, int]

    def lacking(self, cluster: Cluster) -> str:
        """Return how many serve, and what the others do."""
        parts = []
        for role, wanted in self.counts.items():
            those = _of_role(cluster, role)
            others = [f"{one.id} is {one.state}" for one in those if one.state != SERVING]
            serving = len(those) - len(others)
            if others or serving != wanted:
                count = f"{serving} of {wanted} {role} instances serve"
                parts.append(", ".join((count, *others)))
        return ", ".join(parts)

    def hopeless(self, cluster: Cluster) -> str:
        """Return which instances failed: they are not started again."""
        those = (one for role in self.counts for one in _of_role(cluster, role))
        failed = [one.id for one in those if one.state == FAILED]
        return f"{', '.join(failed)} failed; the server's output says why" if failed else ""


@dataclass(frozen=True)
class Gone:
    """There is no instance of this id."""

    instance_id: str

    def lacking(self, cluster: Cluster) -> str:
        """Return what the instance still does."""
        states = (one.state for one in cluster.instances if one.id == self.instance_id)
        state = next(states, None)
        return f"{self.instance_id} is {state}" if state else ""

    def hopeless(self, cluster: Cluster) -> str:
        """Return nothing: one that is drained ends in any case."""
        return ""


def wait_until(
    goal: Goal,
    answer: Answer,
    ask: Callable[[], Answer],
    clock: Clock,
    timeout_seconds: float,
    report: Callable[[str], None],
) -> Answer:
    """Ask again and again until nothing is lacking; return the last answer.

    :param answer: to the change that was asked for.  It says that the change has begun, so an
        instance that had failed before may still be in it.
    :param report: is told what is lacking, each time.
    :raises TryLater: when the time is over.
    :raises KvellError: when it has become hopeless.
    """
    start_seconds = clock.now_seconds()
    while what := goal.lacking(answer.cluster):
        left_seconds = start_seconds + timeout_seconds - clock.now_seconds()
        if left_seconds <= 0:
            raise TryLater(f"not done within {timeout_seconds:g} s, but it goes on: {what}")
        report(what)
        time.sleep(min(POLL_SECONDS, left_seconds))
        answer = ask()
        if why := goal.hopeless(answer.cluster):
            raise KvellError(why)
    return answer


def _of_role(cluster: Cluster, role: str) -> list[Instance]:
    return [one for one in cluster.instances if one.role == role]
