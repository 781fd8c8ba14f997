"""The wait for a change of a server's instances."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvell.cli.cluster.state import Cluster, ClusterAnswer, Instance
from kvell.clock import Clock
from kvell.errors import KvellError, TryLater

POLL_SECONDS = 0.5
SERVING, FAILED = "serving", "failed"


class Goal(Protocol):
    """A state of the cluster to wait for."""

    def lacking(self, cluster: Cluster) -> str:
        """Return a text of what is missing; "" when the goal is reached."""
        ...

    def hopeless(self, cluster: Cluster) -> str:
        """Return a text of why the goal cannot be reached; "" while it can."""
        ...


@dataclass(frozen=True)
class ScaleGoal:
    """The goal that each role has the given number of serving instances and no others."""

    counts: Mapping[str, int]

    def lacking(self, cluster: Cluster) -> str:
        """Return the number of serving instances, and the states of the others."""
        parts = []
        for role, wanted in self.counts.items():
            those = _of_role(cluster, role)
            others = [f"{each.id} is {each.state}" for each in those if each.state != SERVING]
            serving = len(those) - len(others)
            if others or serving != wanted:
                count = f"{serving} of {wanted} {role} instances serve"
                parts.append(", ".join((count, *others)))
        return ", ".join(parts)

    def hopeless(self, cluster: Cluster) -> str:
        those = (instance for role in self.counts for instance in _of_role(cluster, role))
        failed = [instance.id for instance in those if instance.state == FAILED]
        return f"{', '.join(failed)} failed; the server's output says why" if failed else ""


@dataclass(frozen=True)
class RemovalGoal:
    """The goal that no instance has this id."""

    instance_id: str

    def lacking(self, cluster: Cluster) -> str:
        states = (member.state for member in cluster.instances if member.id == self.instance_id)
        state = next(states, None)
        return f"{self.instance_id} is {state}" if state else ""

    def hopeless(self, cluster: Cluster) -> str:
        return ""


def wait_until(
    goal: Goal,
    answer: ClusterAnswer,
    ask: Callable[[], ClusterAnswer],
    clock: Clock,
    timeout_seconds: float,
    report: Callable[[str], None],
) -> ClusterAnswer:
    """Poll the state until the goal is reached; return the last answer.

    :param answer: answer to the request for the change.  It may still list an instance that had
        failed before, so it is not checked for failures.
    :param report: called with a text of what is missing, at each poll.
    :raises TryLater: when the time is over.
    :raises KvellError: when the goal cannot be reached.
    """
    start_seconds = clock.now_seconds()
    while what := goal.lacking(answer.cluster):
        left_seconds = start_seconds + timeout_seconds - clock.now_seconds()
        if left_seconds <= 0:
            raise TryLater(f"not done within {timeout_seconds:g} s; the server continues: {what}")
        report(what)
        time.sleep(min(POLL_SECONDS, left_seconds))
        answer = ask()
        if why := goal.hopeless(answer.cluster):
            raise KvellError(why)
    return answer


def _of_role(cluster: Cluster, role: str) -> list[Instance]:
    return [instance for instance in cluster.instances if instance.role == role]
