"""Workloads of the memory core's bench: decode, prefixes, and the scheduler's calls."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.replay.shapes import Shape, layout_of, read_shape
from kvell.engine.planning.scheduler import COMPACT_LARGE_PAGES
from kvell.memory import Eviction, GroupKind, Implementation, MemoryCore, create_core

Ints = npt.NDArray[np.int32]
NOBODY: Ints = np.empty(0, np.int32)
DECODE_STEPS = 64
"""Four page boundaries for each request."""
WARM_STEPS = 16
"""Untimed steps before them: a page boundary for each request, as in a batch in mid-decode."""
CHUNK_TOKENS = 2048
"""Tokens of a prompt that one step computes."""
FRESH_TOKEN = 7_000_000
"""Tokens from here on are in no cached prefix."""


def ints(values: Any) -> Ints:
    """An int32 array, as the core takes them."""
    return np.asarray(values, np.int32)


@dataclass(frozen=True)
class Times:
    """Seconds of each repetition."""

    seconds: tuple[float, ...]

    def figures(self, per: float = 1.0) -> dict[str, float]:
        """Best and median microseconds, divided by ``per``."""
        best, median = min(self.seconds), float(np.median(self.seconds))
        return {"best_us": best / per * 1e6, "median_us": median / per * 1e6}


def timed(
    work: Callable[[], object], repeats: int, before: Callable[[], None] | None = None
) -> Times:
    """Seconds of ``work``, each time after an untimed ``before``."""
    seconds = []
    for _ in range(repeats):
        if before is not None:
            before()
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return Times(tuple(seconds))


def timed_beside(
    work: Callable[[], object],
    yardstick: Callable[[], object],
    repeats: int,
    before: Callable[[], None],
) -> tuple[Times, float]:
    """Seconds of ``work``, and the median of its time over that of a yardstick.

    The yardstick, always the same work, is timed before and after each repetition, so whatever
    slows the whole machine slows both.
    """
    spent: list[float] = []
    lengths: list[float] = []
    for _ in range(repeats):
        before()
        first = timed(yardstick, 1).seconds[0]
        spent += timed(work, 1).seconds
        lengths.append(spent[-1] * 2 / (first + timed(yardstick, 1).seconds[0]))
    return Times(tuple(spent)), float(np.median(lengths))


class Scheduled:
    """A core, called as the engine's scheduler calls it in one step."""

    def __init__(self, core: MemoryCore) -> None:
        self.core = core
        self.step = 0
        self.has_states = any(g.kind is GroupKind.STATE for g in core.layout.groups)

    def prefill(self, handle: int, tokens: int, chunk_tokens: int) -> None:
        """Compute a request's tokens in chunks, with the states worth keeping on the way.

        :raises MemoryError: if the pool is too small.
        """
        one, computed = ints([handle]), self.core.hit_tokens(handle)
        while computed < tokens:
            computed = min(tokens, computed + chunk_tokens)
            self.begin()
            self.grow(one, ints([computed]))
            self.finish(one, ints([computed]))
            self.core.advance(one, ints([computed]))

    def decode(self, handles: Ints, tokens: Ints, lengths: Ints) -> None:
        """One step of a batch that only decodes; ``lengths`` include the token appended."""
        self.begin()
        self.core.append(handles, tokens)
        self.grow(handles, lengths)
        self.finish(NOBODY, NOBODY)
        self.core.advance(handles, lengths)

    def begin(self) -> None:
        """Begin the next step."""
        self.step += 1
        self.core.begin_step(self.step)

    def grow(self, handles: Ints, lengths: Ints) -> None:
        """Grow all requests.

        :raises MemoryError: if the pool is too small.
        """
        served, _ = self.core.grow(handles, lengths)
        if served < len(handles):
            raise MemoryError("the pool is too small for this batch and context")

    def finish(self, handles: Ints, until: Ints) -> None:
        """End the plan of a step; ``handles`` may keep a checkpoint of their state."""
        if self.has_states:
            self.core.checkpoint(handles, until)
        self.core.compact(COMPACT_LARGE_PAGES)
        self.core.copies()


class Decoding:
    """A batch that decodes behind one long cached prefix; prompt ends are spread over a page.

    :param own: least tokens of each prompt behind the prefix. With a window's length or more, the
        pages that the next request would resume from are behind the window, yet kept young.
    """

    def __init__(self, core: MemoryCore, context: int, batch: int, own: int = 1) -> None:
        self.scheduled, self.batch, self.rounds = Scheduled(core), batch, 0
        self.prefix, self.own = np.arange(context, dtype=np.int32), own
        self.handles = self.tokens = self.lengths = NOBODY
        core.close(self._start(0))

    def _start(self, index: int) -> int:
        """Start a request and compute its prompt; its last tokens are unique."""
        own = np.full(
            self.own + index % 16, FRESH_TOKEN + self.rounds * self.batch + index, np.int32
        )
        prompt = np.concatenate([self.prefix, own])
        core = self.scheduled.core
        handle = core.open(prompt, "")
        core.claim(handle, len(prompt) + WARM_STEPS + DECODE_STEPS)
        self.scheduled.prefill(handle, len(prompt), CHUNK_TOKENS)
        return handle

    def prepare(self) -> None:
        """Replace the batch by a new one that decodes; they share only the prefix."""
        for handle in self.handles:
            self.scheduled.core.close(int(handle))
        self.rounds += 1
        self.handles = ints([self._start(i) for i in range(self.batch)])
        self.tokens = self.handles
        self.lengths = ints([len(self.prefix) + self.own + i % 16 for i in range(self.batch)])
        self.run(WARM_STEPS)

    def run(self, steps: int = DECODE_STEPS) -> None:
        """Decode ``steps`` tokens; all arrays were prepared."""
        for _ in range(steps):
            self.lengths += 1
            self.scheduled.decode(self.handles, self.tokens, self.lengths)

    def quiet(self) -> None:
        """Call ``grow`` and ``advance`` with nothing new: no request crosses a page boundary."""
        core = self.scheduled.core
        for _ in range(DECODE_STEPS):
            core.grow(self.handles, self.lengths)
            core.advance(self.handles, self.lengths)


class Prefixes:
    """One cached prompt, and unknown prompts, each computed in one step."""

    def __init__(self, core: MemoryCore, tokens: int, repeats: int) -> None:
        self.core, self.scheduled = core, Scheduled(core)
        self.cached = np.arange(tokens, dtype=np.int32)
        self.fresh = [self.cached + FRESH_TOKEN * (i + 1) for i in range(repeats)]
        self.until = ints([tokens])
        self.handle = ints([self._grown(self.cached)])
        self.insert()

    def _grown(self, prompt: Ints) -> int:
        handle = self.core.open(prompt, "")
        self.core.claim(handle, len(prompt))
        self.scheduled.begin()
        self.scheduled.grow(ints([handle]), ints([len(prompt)]))
        self.scheduled.finish(ints([handle]), ints([len(prompt)]))
        return handle

    def match(self) -> int:
        """Return how many tokens of the cached prompt could be resumed."""
        return self.core.peek(self.cached, "")

    def hit(self) -> None:
        """Find and reference its pages, then give them back."""
        self.core.close(self.core.open(self.cached, ""))

    def prepare_insert(self) -> None:
        """Start the request whose tokens :meth:`insert` publishes."""
        self.core.close(int(self.handle[0]))
        self.handle = ints([self._grown(self.fresh.pop())])

    def insert(self) -> None:
        """Put a whole unknown prompt, its pages and its states into the index."""
        self.core.advance(self.handle, self.until)


def longest_window(core: MemoryCore) -> int:
    """Tokens of the longest window among the groups; 0 without windows."""
    kinds = (GroupKind.SLIDING, GroupKind.CHUNKED)
    return max((g.window_tokens for g in core.layout.groups if g.kind in kinds), default=0)


def core_of(
    shape: str, pool_bytes: int, implementation: Implementation, eviction: Eviction
) -> MemoryCore:
    """An empty core for a shape and a pool."""
    return create_core(layout_of(cached_shape(shape), pool_bytes), implementation, eviction)


@cache
def cached_shape(name: str) -> Shape:
    """A shape of ``bench/configs``, read once."""
    return read_shape(name)
