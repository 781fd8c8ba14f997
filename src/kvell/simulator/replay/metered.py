"""Meter of a memory core: time inside its calls, and the progress of each holder."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ParamSpec, TypeVar

from kvell.memory import GroupSpec, Images, Layout, MemoryCore, PoolSnapshot, facts_of
from kvell.pages.snapshot import PoolTotals
from kvell.prefix.interface import Ints
from kvell.prefix.tokens import Tokens
from kvell.simulator.report.metrics import RunningRequest

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


def _nothing() -> None:
    """Do nothing."""


class MeteredCore:
    """Wrapper that passes all calls on to ``core`` and decides nothing.

    :ivar nanoseconds: time inside the calls that manage memory, not in those that only look.
    :ivar on_advanced: called when a step's tokens are computed and pages before windows are
        released, but those of finished requests are not yet: the moment of sampling.
    """

    def __init__(self, core: MemoryCore) -> None:
        self.nanoseconds = 0
        self._watched: dict[int, RunningRequest] = {}
        self.on_advanced: Callable[[], None] = _nothing
        self._core = core

    @property
    def layout(self) -> Layout:
        """The core's layout."""
        return self._core.layout

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
        """Pass on to the :class:`MemoryCore` and time, like every call below."""
        self._timed(self._core.begin_step, step)

    def register(self, groups: Sequence[GroupSpec]) -> None:
        """Pass on."""
        self._timed(self._core.register, groups)

    def peek(
        self,
        tokens: Tokens,
        root: str,
        *,
        images: Images | None = None,
        prompt_tokens: int | None = None,
        model: str = "",
    ) -> int:
        """Pass on."""
        return self._timed(
            self._core.peek, tokens, root, images=images, prompt_tokens=prompt_tokens, model=model
        )

    def known(self, tokens: Tokens, root: str, *, model: str = "") -> Ints:
        """Pass on."""
        return self._timed(self._core.known, tokens, root, model=model)

    def delete(self, tokens: Tokens, root: str, *, model: str = "") -> int:
        """Pass on."""
        return self._timed(self._core.delete, tokens, root, model=model)

    def open(
        self,
        tokens: Tokens,
        root: str,
        lease_until: int | None = None,
        *,
        reuse: bool = True,
        images: Images | None = None,
        prompt_tokens: int | None = None,
        model: str = "",
    ) -> int:
        """Pass on; the holder is tracked from now on, unless it is a lease."""
        handle = self._timed(
            self._core.open,
            tokens,
            root,
            lease_until,
            reuse=reuse,
            images=images,
            prompt_tokens=prompt_tokens,
            model=model,
        )
        hit = self._core.hit_tokens(handle)
        facts = facts_of(len(tokens), prompt_tokens, images)
        if lease_until is None:
            self._watched[handle] = RunningRequest(hit, hit, facts, model)
        return handle

    def running(self) -> list[RunningRequest]:
        """Return the progress of each open holder."""
        return list(self._watched.values())

    def claim(self, handle: int, expected_tokens: int, *, will_return: bool | None = None) -> None:
        """Pass on."""
        self._timed(self._core.claim, handle, expected_tokens, will_return=will_return)

    def hit_tokens(self, handle: int) -> int:
        """Pass on."""
        return self._timed(self._core.hit_tokens, handle)

    def send_away(self, handle: int, away_tokens: int) -> None:
        """Pass on."""
        self._timed(self._core.send_away, handle, away_tokens)

    def receive(self, handle: int, computed: int) -> None:
        """Pass on."""
        self._timed(self._core.receive, handle, computed)
        self._watched[handle] = replace(self._watched[handle], computed=computed)

    def sources(self, handle: int) -> Ints:
        """Pass on."""
        return self._timed(self._core.sources, handle)

    def grow(self, handles: Ints, until: Ints) -> tuple[int, Ints]:
        """Pass on."""
        return self._timed(self._core.grow, handles, until)

    def largest(self, handle: int, until: int) -> int:
        """Pass on."""
        return self._timed(self._core.largest, handle, until)

    def held_pages(self, handle: int) -> Ints:
        """Pass on."""
        return self._timed(self._core.held_pages, handle)

    def fits(
        self, handle: int, until: int, chunk_tokens: int, others: Ints, others_until: Ints
    ) -> bool:
        """Pass on."""
        return self._timed(self._core.fits, handle, until, chunk_tokens, others, others_until)

    def may_fit(self) -> bool:
        """Pass on."""
        return self._timed(self._core.may_fit)

    def copies(self) -> Ints:
        """Pass on."""
        return self._timed(self._core.copies)

    def checkpoint(self, handles: Ints, until: Ints) -> Ints:
        """Pass on."""
        return self._timed(self._core.checkpoint, handles, until)

    def compact(self, most_large: int) -> Ints:
        """Pass on."""
        return self._timed(self._core.compact, most_large)

    def append(self, handles: Ints, tokens: Ints) -> None:
        """Pass on."""
        self._timed(self._core.append, handles, tokens)

    def advance(self, handles: Ints, computed: Ints) -> None:
        """Pass on; then call ``on_advanced``."""
        self._timed(self._core.advance, handles, computed)
        watched = self._watched
        for handle, length in zip(handles.tolist(), computed.tolist(), strict=True):
            before = watched[handle]  # `replace` takes 3 times as long, for every token of a trace
            watched[handle] = RunningRequest(length, before.hit_tokens, before.facts, before.model)
        self.on_advanced()

    def close(self, handle: int, *, renew: bool = True, returns: bool = False) -> None:
        """Pass on; the holder is no longer tracked."""
        self._timed(self._core.close, handle, renew=renew, returns=returns)
        self._watched.pop(handle, None)

    def empty_large_pages(self) -> int:
        """Pass on."""
        return self._timed(self._core.empty_large_pages)

    def evicted_pages(self) -> tuple[int, ...]:
        """Pass on."""
        return self._timed(self._core.evicted_pages)

    def totals(self) -> PoolTotals:
        """Pass on, not timed."""
        return self._core.totals()

    def snapshot(self) -> PoolSnapshot:
        """Pass on, not timed."""
        return self._core.snapshot()
