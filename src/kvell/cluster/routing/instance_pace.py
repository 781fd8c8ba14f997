"""The prompts of one instance in time: how long they take, and how much of them is done."""

from dataclasses import dataclass

from kvell.cluster.routing.crowd import Crowd, CrowdTime
from kvell.cluster.routing.pace import Pace, PromptWork
from kvell.cost.prices import ExecCosts

SHARED = 0.5
"""A prompt that was done in less than this part of its time shared a step with an earlier one."""


@dataclass(frozen=True)
class FirstToken:
    """When a request's first token comes.

    :param seconds: from now on.
    :param work: its own prompt.
    :param since: the time of the prediction.
    :param fetches: whether it waits for pages of another instance, and so shows no pace.
    """

    seconds: float
    work: PromptWork
    since: CrowdTime
    fetches: bool = False


class InstancePace:
    """An instance's pace among those of its host.

    :param pace: shared with instances of equal prices on the host.
    :param crowd: the instances of the host.
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
