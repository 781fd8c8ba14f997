"""The logical size of the CPU buffer: eLLM's Algorithm 2; and the holders of its chunks.

The logical size is between one chunk and the physical size. A violation of the time between tokens
halves it, which limits prefills ahead of decodes; else a violation of the time to the first token
doubles it, or makes it as large as the last refused request needed, since less would be useless.
(The paper's line 4 prints min(B·α, B); B_max is meant.) Three late iterations of five are a
violation; after a change the window is empty again.

::

            TTFT: × α, at least the refused size, at most physical
        ┌────────────────────┐
        │                    ▼
    [1 … size … physical]   held chunks stay, whatever the size: shrinking refuses, never evicts
        ▲                    │
        └────────────────────┘
            TPOT: ÷ α, at least 1   (wins over TTFT)
"""

from collections import deque
from collections.abc import Hashable

ALPHA = 2
WINDOW_ITERATIONS = 5
LATE_ITERATIONS = 3


def scale(
    logical: int, physical: int, *, ttft: bool, tpot: bool, alpha: int = ALPHA, wanted: int = 0
) -> int:
    """Return the new logical size, in chunks, after violations (Algorithm 2).

    :param wanted: the size that the last refused request needed.
    """
    if tpot:
        return max(logical // alpha, 1)
    if ttft:
        return min(max(logical * alpha, wanted), physical)
    return logical


class CpuBuffer:
    """The chunks of the CPU buffer: its holders, and the number of chunks that may be held.

    :param logical_chunks: the first logical size; constant with ``is_fixed``.
    """

    def __init__(
        self, physical_chunks: int, logical_chunks: int = 1, *, is_fixed: bool = False
    ) -> None:
        self.physical_chunks = physical_chunks
        self.logical_chunks = min(physical_chunks, logical_chunks)
        self.held: dict[Hashable, int] = {}
        self._is_fixed = is_fixed
        self._wanted_chunks = 0
        self._late: deque[tuple[bool, bool]] = deque(maxlen=WINDOW_ITERATIONS)

    @property
    def held_chunks(self) -> int:
        return sum(self.held.values())

    @property
    def free_chunks(self) -> int:
        """The number of further chunks that may be used; 0 if too many are held."""
        return max(0, self.logical_chunks - self.held_chunks)

    def note_refused(self, chunks: int) -> None:
        """Record a refused request for ``chunks`` more."""
        self._wanted_chunks = self.held_chunks + chunks

    def note_iteration(self, *, ttft_late: bool, tpot_late: bool) -> None:
        """Count a completed step, and adapt the size if a target is violated."""
        self._late.append((ttft_late, tpot_late))
        if self._is_fixed or not self.physical_chunks:
            return
        size = scale(
            self.logical_chunks,
            self.physical_chunks,
            ttft=sum(ttft for ttft, _ in self._late) >= LATE_ITERATIONS,
            tpot=sum(tpot for _, tpot in self._late) >= LATE_ITERATIONS,
            wanted=self._wanted_chunks,
        )
        if size != self.logical_chunks:
            self.logical_chunks = size
            self._wanted_chunks = 0
            self._late.clear()

    def hold(self, holder: Hashable, chunks: int, *, whatever_size: bool = False) -> bool:
        """Take chunks for a holder, all or none; return False if they are not free.

        :param whatever_size: take them in any case: the holder is in the buffer already.
        """
        if chunks > self.free_chunks and not whatever_size:
            return False
        if chunks:
            self.held[holder] = self.held.get(holder, 0) + chunks
        return True

    def release(self, holder: Hashable) -> int:
        """Free a holder's chunks; return how many it held."""
        return self.held.pop(holder, 0)
