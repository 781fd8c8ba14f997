"""Engine counters with more than one number; deterministic, like the core."""

from bisect import bisect_left
from collections.abc import Sequence

from kvell.engine.requests.plan import NewPages, TeamTime
from kvell.memory import GroupSpec
from kvell.pages.rows import NewPageRow

STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of step-size buckets, as in vLLM's ``iteration_tokens_total``."""


def pages_bytes(pages: Sequence[int], groups: Sequence[GroupSpec]) -> int:
    return sum(count * groups[index].page_stride_bytes for index, count in enumerate(pages))


def group_hits(
    groups: Sequence[GroupSpec], model: str, held: NewPages, hit_tokens: int
) -> tuple[int, ...]:
    """Return the cached tokens that a request takes in each group; a window takes its own only.

    :param held: table rows of the pages that it holds before it computes any.
    """
    hits = [0] * len(groups)
    for index, group in enumerate(groups):
        is_looked_up = group.kind.counts_tokens and group.required_for_hit
        if group.model != model or not is_looked_up:
            continue
        positions = held[held[:, NewPageRow.GROUP] == index, NewPageRow.POSITION]
        first = int(positions.min()) if len(positions) else hit_tokens // group.page_tokens
        hits[index] = max(0, hit_tokens - first * group.page_tokens)
    return tuple(hits)


class StepSizes:
    """A histogram of steps by the number of tokens computed."""

    def __init__(self) -> None:
        self.tokens = 0
        self.by_size = [0] * (len(STEP_TOKENS_BUCKETS) + 1)
        """Number of steps per bucket, not cumulative; the last has no upper bound."""

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        self.by_size[bisect_left(STEP_TOKENS_BUCKETS, tokens)] += 1


class DraftTokens:
    """Counts of draft tokens, and of accepted ones by position."""

    def __init__(self) -> None:
        self.drafts = 0
        self.draft_tokens = 0
        self.accepted: list[int] = []
        """By position after the newest token, the number of accepted draft tokens."""

    def add(self, proposed: int, accepted: int) -> None:
        """Count ``proposed`` draft tokens of a request's step, the first ``accepted`` accepted."""
        if not proposed:
            return
        self.drafts += 1
        self.draft_tokens += proposed
        self.accepted += [0] * (proposed - len(self.accepted))
        for position in range(accepted):
            self.accepted[position] += 1


class TeamCounts:
    """The time of steps' threads, and the part lost to other programs on their processors."""

    def __init__(self) -> None:
        self._last: TeamTime | None = None
        self._thread_seconds = self._lost_seconds = 0.0

    def add(self, team: TeamTime | None) -> None:
        if team is None:
            return
        self._last = team
        self._thread_seconds += team.thread_seconds
        self._lost_seconds += team.lost_seconds

    def figures(self) -> dict[str, float]:
        """Return figures for :class:`kvell.engine.protocol.statistics.Stats`; empty if no step had
        its own threads."""
        if self._last is None:
            return {}
        return {
            "threads": self._last.threads,
            "shared": int(self._last.is_shared),
            "thread_seconds": self._thread_seconds,
            "lost_seconds": self._lost_seconds,
        }
