"""How much of the CPU buffer may be used now: eLLM's Algorithm 2, and who uses it.

The logical size lies between one chunk and the physical size.  A violation of the time between
tokens halves it, which limits prefills that go ahead of decodes; else a violation of the time
to the first token doubles it, or makes it as large as what was refused last, since less is the
same as nothing.  (The paper's line 4 prints min(B·α, B); B_max is meant.)  Three late iterations
of five are a violation; after a change the window starts anew.

::

            TTFT: × α, at least what was refused, at most physical
        ┌────────────────────┐
        │                    ▼
    [1 … size … physical]   what is held stays, whatever the size: shrinking refuses, never evicts
        ▲                    │
        └────────────────────┘
            TPOT: ÷ α, at least 1   (wins over TTFT)
"""

from collections import deque
from dataclasses import dataclass, field

ALPHA = 2
WINDOW_ITERATIONS = 5
LATE_ITERATIONS = 3


@dataclass
class SloWindow:
    """Whether the last iterations were late, for one target."""

    late: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW_ITERATIONS))

    def note(self, is_late: bool) -> None:
        """One iteration is over."""
        self.late.append(is_late)

    @property
    def is_violated(self) -> bool:
        """Whether at least ``LATE_ITERATIONS`` of the last iterations were late."""
        return sum(self.late) >= LATE_ITERATIONS


def scaled(
    logical: int, physical: int, *, ttft: bool, tpot: bool, alpha: int = ALPHA, wanted: int = 0
) -> int:
    """Algorithm 2: the new logical size, in chunks, from what was violated.

    :param wanted: the size at which what was refused last would not have been.
    """
    if tpot:
        return max(logical // alpha, 1)
    if ttft:
        return min(max(logical * alpha, wanted), physical)
    return logical


class CpuBuffer:
    """Chunks of the CPU buffer: who holds how many, and how many may be held.

    :param logical_chunks: where the logical size starts; fixed with ``is_fixed``.
    """

    def __init__(
        self, physical_chunks: int, logical_chunks: int = 1, *, is_fixed: bool = False
    ) -> None:
        self.physical_chunks = physical_chunks
        self.logical_chunks = min(physical_chunks, logical_chunks)
        self.held: dict[int, int] = {}
        self._is_fixed = is_fixed
        self._wanted_chunks = 0
        self._ttft, self._tpot = SloWindow(), SloWindow()

    @property
    def held_chunks(self) -> int:
        """Chunks in use."""
        return sum(self.held.values())

    @property
    def free_chunks(self) -> int:
        """Chunks that may be used beside those that are; 0 while more are held than the size."""
        return max(0, self.logical_chunks - self.held_chunks)

    def note_refused(self, chunks: int) -> None:
        """So many were asked for beside those held, and are more than may be used now."""
        self._wanted_chunks = self.held_chunks + chunks

    def note_iteration(self, *, ttft_late: bool, tpot_late: bool) -> None:
        """Count a step that is over, and adapt the size if a target is violated.

        :param ttft_late: whether a first token came later than its target.
        :param tpot_late: whether a further token came later than its target.
        """
        self._ttft.note(ttft_late)
        self._tpot.note(tpot_late)
        if self._is_fixed or not self.physical_chunks:
            return
        size = scaled(
            self.logical_chunks,
            self.physical_chunks,
            ttft=self._ttft.is_violated,
            tpot=self._tpot.is_violated,
            wanted=self._wanted_chunks,
        )
        if size != self.logical_chunks:
            self.logical_chunks, self._wanted_chunks = size, 0
            self._ttft, self._tpot = SloWindow(), SloWindow()

    def hold(self, holder: int, chunks: int, *, whatever_size: bool = False) -> bool:
        """Take chunks for a holder, all or none; False if they may not be had now.

        :param whatever_size: the holder is in the buffer already, and asks nobody.
        """
        if chunks > self.free_chunks and not whatever_size:
            return False
        if chunks:
            self.held[holder] = self.held.get(holder, 0) + chunks
        return True

    def release(self, holder: int) -> int:
        """A holder's chunks are free again; returns how many, 0 for who holds none."""
        return self.held.pop(holder, 0)
