"""How the threads of a compiled pass go through it beside others: a rule over what they lost.

Alone on its processors a team is fastest where every thread keeps its own part and all meet after
each phase.  With a neighbour on one of them all wait for the thread that the system takes away in
the middle of a share: one busy program halved the speed of both.  So beside a neighbour the team
takes shares as they come, and the threads that lose time rest between two shares, which gives the
neighbour its time where nobody waits for it.  No answer depends on either.
"""

from collections.abc import Sequence
from typing import NamedTuple

SHARED_ABOVE, ALONE_BELOW = 0.35, 0.22
"""Parts of a pass that its threads lose together.  Above the first a team gives way, below the
second it goes as if alone again: rests cost decodes a fifth of their speed, and as if alone a team
loses about as much as its threads do.  A program that is busy a fifth of the time stays below."""

WEIGHT = 1 / 16
"""Of the newest step in what threads lose on average."""

MOST_RESTING_TOKENS = 64
"""Longer steps lose more by rests than they gain: their phases are as long as what the system takes
away."""

RESTS_ABOVE = 0.05
"""A thread that loses more on average rests."""

WORK_NS, REST_NS = 100_000, 50_000


class Way(NamedTuple):
    """How a pass is gone through; what the compiled pass takes (``csrc/forward/neighbours.h``).

    :param threads: of the team.
    :param is_shared: others run on its processors, so nobody waits for a thread without a share.
    :param resting: by bit: threads that rest between shares.
    :param work_ns: for how long a thread works between two rests.
    :param rest_ns: for how long it rests.
    """

    threads: int
    is_shared: bool = False
    resting: int = 0
    work_ns: int = WORK_NS
    rest_ns: int = REST_NS


class Passed(NamedTuple):
    """What the threads of a pass did.

    :param took_ns: from its begin to its end.
    :param lost_ns: of each thread: when it could have run and another program did.
    """

    way: Way
    took_ns: int
    lost_ns: Sequence[int]


class TeamRule:
    """Chooses the way of every pass; a neighbour that one kind of step saw is there for all.

    :param threads: of the team.
    :param is_fixed: the team always goes as if it were alone.
    """

    def __init__(self, threads: int, *, is_fixed: bool = False) -> None:
        self._alone = self._short = self._long = Way(threads)
        self._is_fixed = is_fixed or threads == 1
        self._lost = [0.0] * threads  # part of a pass that each loses, on average

    def way(self, tokens: int) -> Way:
        """Return how the next pass, over so many tokens, is gone through."""
        return self._short if tokens <= MOST_RESTING_TOKENS else self._long

    def note(self, passed: Passed) -> None:
        """Take in what the threads of a pass lost to others on their processors."""
        if self._is_fixed:
            return
        took_ns = max(1, passed.took_ns)
        self._lost = [
            mean + WEIGHT * (lost_ns / took_ns - mean)
            for mean, lost_ns in zip(self._lost, passed.lost_ns, strict=True)
        ]
        if sum(self._lost) > (ALONE_BELOW if self._long.is_shared else SHARED_ABOVE):
            self._long = self._alone._replace(is_shared=True)
            self._short = self._long._replace(resting=_resting(self._lost))
        else:
            self._short = self._long = self._alone


def _resting(lost: Sequence[float]) -> int:
    """Threads that lose time, by bit, but for the caller's own.

    Where that one alone loses, the last rests for it: the system puts the neighbour where a
    processor is idle now and then.
    """
    losing = [index for index, part in enumerate(lost) if part > RESTS_ABOVE and index > 0]
    return sum(1 << index for index in losing or [len(lost) - 1] if index < 64)
