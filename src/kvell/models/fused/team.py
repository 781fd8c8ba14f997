"""A rule for the threads of a compiled pass that share their processors with other programs.

Alone on its processors a team is fastest if every thread keeps its own part and all meet after each
phase. With another program on one of them all wait for the thread that the system suspends in the
middle of a share: one busy program halved the speed of both. So a team with such a neighbour takes
shares dynamically, and the threads that lose time rest between two shares, which leaves the
neighbour time in which no thread waits for it. No answer depends on either.
"""

from collections.abc import Sequence
from typing import NamedTuple

SHARED_ABOVE, ALONE_BELOW = 0.35, 0.22
"""Parts of a pass that its threads lose together. Above the first, a team shares its processors;
below the second, it runs as if alone again: rests cost decodes a fifth of their speed, and as if
alone a team loses about as much as its threads do. A program that is busy a fifth of the time stays
below."""

WEIGHT = 1 / 16
"""Weight of the newest step in the average loss of threads."""

MOST_RESTING_TOKENS = 64
"""Longer steps lose more by rests than they gain: their phases are as long as the time for which
the system suspends a thread."""

RESTS_ABOVE = 0.05
"""A thread with a larger average loss rests."""

WORK_NS, REST_NS = 100_000, 50_000


class Way(NamedTuple):
    """The schedule of a pass, in the form of the compiled pass (``csrc/forward/neighbours.h``).

    :param threads: of the team.
    :param is_shared: others run on its processors, so no thread waits for one without a share.
    :param resting: by bit: threads that rest between shares.
    :param work_ns: time that a thread works between two rests.
    :param rest_ns: duration of a rest.
    """

    threads: int
    is_shared: bool = False
    resting: int = 0
    work_ns: int = WORK_NS
    rest_ns: int = REST_NS


class PassRecord(NamedTuple):
    """The record of a pass: its duration, and the losses of its threads.

    :param took_ns: from its begin to its end.
    :param lost_ns: of each thread: when it could have run and another program did.
    """

    way: Way
    took_ns: int
    lost_ns: Sequence[int]


class TeamRule:
    """Choice of the schedule of every pass; a neighbour seen by one kind of step counts for all.

    :param threads: of the team.
    :param is_fixed: the team always runs as if it were alone.
    """

    def __init__(self, threads: int, *, is_fixed: bool = False) -> None:
        self._alone = self._short = self._long = Way(threads)
        self._is_fixed = is_fixed or threads == 1
        self._lost = [0.0] * threads  # average part of a pass that each loses

    def way(self, tokens: int) -> Way:
        """Return the schedule of the next pass, over ``tokens`` tokens."""
        return self._short if tokens <= MOST_RESTING_TOKENS else self._long

    def note(self, passed: PassRecord) -> None:
        """Record the time that the threads of a pass lost to others on their processors."""
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
    """Return the threads that lose time, by bit, without the caller's own.

    If only the caller's thread loses, the last rests for it: the system moves the neighbour to a
    processor that is idle now and then.
    """
    losing = [index for index, part in enumerate(lost) if part > RESTS_ABOVE and index > 0]
    return sum(1 << index for index in losing or [len(lost) - 1] if index < 64)
