"""How the threads of a compiled pass go through it beside others: a rule over what they lost.

Alone on its processors a team is fastest where every thread keeps its own part and all meet after
each phase.  With a neighbour on one of them all wait for the thread that the system takes away in
the middle of a share: one busy program halved the speed of both.  So beside a neighbour the team
takes shares as they come, and the threads that lose time rest between two shares, which gives the
neighbour its time where nobody waits for it.  No answer depends on either.
"""

from collections.abc import Sequence
from typing import NamedTuple

LOST_SHARE = 0.1
"""A thread that loses so much of a pass has a neighbour."""

STEPS_TO_SHARE, STEPS_TO_CALM = 2, 8
"""Steps in a row that lose before the team goes as beside a neighbour, and without a loss before a
thread goes as if alone again.  A thread that rests loses time beside a neighbour, too."""

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
        self._alone = self._way = Way(threads)
        self._is_fixed = is_fixed or threads == 1
        self._losses = 0  # steps in a row that lost
        self._since: list[int] = []  # steps since each thread lost

    def way(self) -> Way:
        """Return how the next pass is gone through."""
        return self._way

    def note(self, passed: Passed) -> None:
        """Take in what the threads of a pass lost to others on their processors."""
        if self._is_fixed:
            return
        least_ns, is_shared = LOST_SHARE * passed.took_ns, self._way.is_shared
        self._losses = self._losses + 1 if max(passed.lost_ns) > least_ns else 0
        if not is_shared:
            if self._losses < STEPS_TO_SHARE:
                return
            self._since = [STEPS_TO_CALM] * len(passed.lost_ns)
        self._since = [
            0 if lost > least_ns else steps + 1
            for lost, steps in zip(passed.lost_ns, self._since, strict=True)
        ]
        if min(self._since) < STEPS_TO_CALM:
            self._way = self._alone._replace(is_shared=True, resting=_resting(self._since))
        else:
            self._way = self._alone


def _resting(since: Sequence[int]) -> int:
    """Threads that lost lately, by bit, but for the caller's own.

    Where that one alone lost, the last rests for it: the system puts the neighbour where a
    processor is idle now and then.
    """
    lately = [index for index, steps in enumerate(since) if steps < STEPS_TO_CALM and index > 0]
    if not lately and since[0] < STEPS_TO_CALM:
        lately = [len(since) - 1]
    return sum(1 << index for index in lately if index < 64)
