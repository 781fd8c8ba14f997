"""A memory core that is watched: time inside its calls, and how far each holder has come."""

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from kvell.memory import MemoryCore, PoolSnapshot
from kvell.pages.snapshot import PoolTotals
from kvell.prefix.interface import Ints
from kvell.prefix.radix import Tokens

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


def _nothing() -> None:
    """Called after a step's tokens are computed, unless the owner wants to look."""


class MeteredCore:
    """Passes every call on to ``core``; decides nothing.

    :ivar nanoseconds: time inside the calls that manage memory (looking does not count).
    :ivar computed: tokens computed, by open handle.
    :ivar hits: tokens that a prefix hit covers, by open handle.
    :ivar on_advanced: called when a step's tokens are computed, pages behind windows are
        released, and nothing of finished requests is: the moment at which metrics look.
    """

    def __init__(self, core: MemoryCore) -> None:
        self.layout = core.layout
        self.nanoseconds = 0
        self.computed: dict[int, int] = {}
        self.hits: dict[int, int] = {}
        self.on_advanced: Callable[[], None] = _nothing
        self._core = core

    def _timed(
        self,
        call: Callable[Arguments, Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Answer:
        start = time.perf_counter_ns()
        try:
            return call(*args, **kwargs)
        finally:
            self.nanoseconds += time.perf_counter_ns() - start

    def begin_step(self, step: int) -> None:
        """See :class:`MemoryCore`, here and below."""
        self._timed(self._core.begin_step, step)

    def peek(self, tokens: Tokens, root: str) -> int:
        """Passed on."""
        return self._timed(self._core.peek, tokens, root)

    def open(
        self, tokens: Tokens, root: str, lease_until: int | None = None, *, reuse: bool = True
    ) -> int:
        """Passed on; the holder is watched from now on."""
        handle = self._timed(self._core.open, tokens, root, lease_until, reuse=reuse)
        self.hits[handle] = self.computed[handle] = self._core.hit_tokens(handle)
        return handle

    def claim(self, handle: int, expected_tokens: int) -> None:
        """Passed on."""
        self._timed(self._core.claim, handle, expected_tokens)

    def hit_tokens(self, handle: int) -> int:
        """Passed on."""
        return self._timed(self._core.hit_tokens, handle)

    def grow(self, handles: Ints, until: Ints) -> tuple[int, Ints]:
        """Passed on."""
        return self._timed(self._core.grow, handles, until)

    def largest(self, handle: int, until: int) -> int:
        """Passed on."""
        return self._timed(self._core.largest, handle, until)

    def held_pages(self, handle: int) -> Ints:
        """Passed on."""
        return self._timed(self._core.held_pages, handle)

    def fits(
        self, handle: int, until: int, chunk_tokens: int, others: Ints, others_until: Ints
    ) -> bool:
        """Passed on."""
        return self._timed(self._core.fits, handle, until, chunk_tokens, others, others_until)

    def append(self, handles: Ints, tokens: Ints) -> None:
        """Passed on."""
        self._timed(self._core.append, handles, tokens)

    def advance(self, handles: Ints, computed: Ints) -> None:
        """Passed on; then whoever watches looks."""
        self._timed(self._core.advance, handles, computed)
        self.computed.update(zip(handles.tolist(), computed.tolist(), strict=True))
        self.on_advanced()

    def close(self, handle: int, *, renew: bool = True) -> None:
        """Passed on; the holder is watched no more."""
        self._timed(self._core.close, handle, renew=renew)
        del self.computed[handle], self.hits[handle]

    def totals(self) -> PoolTotals:
        """Passed on, not timed."""
        return self._core.totals()

    def snapshot(self) -> PoolSnapshot:
        """Passed on, not timed."""
        return self._core.snapshot()
