"""What the memory core is measured with: models, decode, prefixes, and a whole small trace."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvell.memory import (
    GroupKind,
    Implementation,
    LayerSpec,
    Layout,
    MemoryCore,
    create_core,
    plan_layout,
)

Ints = npt.NDArray[np.int32]
DECODE_STEPS = 64
"""Four page boundaries for each request."""


def llama_like() -> list[LayerSpec]:
    """One group: 32 full layers, 8 KV heads of 128, bf16."""
    return [LayerSpec(i, GroupKind.FULL, 8, 128, 2) for i in range(32)]


def gemma3_27b_like() -> list[LayerSpec]:
    """Two groups: 52 sliding layers of 1,024 tokens, 10 full; 16 KV heads of 128, bf16."""
    full = [LayerSpec(i, GroupKind.FULL, 16, 128, 2) for i in range(5, 60, 6)]
    rest = sorted(set(range(62)) - {layer.index for layer in full})
    return full + [LayerSpec(i, GroupKind.SLIDING, 16, 128, 2, 1024) for i in rest]


MODELS: dict[str, Callable[[], list[LayerSpec]]] = {
    "llama3-8b": llama_like,
    "gemma3-27b": gemma3_27b_like,
}


def layout_of(model: str, pool_bytes: int) -> Layout:
    """The model's groups over a pool of this size."""
    return plan_layout(MODELS[model](), pool_bytes)


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
    work: Callable[[], None], repeats: int, before: Callable[[], None] | None = None
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


class Decoding:
    """A batch of requests that share one long prefix and decode, ends spread over a page."""

    def __init__(self, core: MemoryCore, context: int, batch: int, repeats: int) -> None:
        self.core, self.step = core, 1
        prefix = np.arange(context, dtype=np.int32)
        more = (repeats + 1) * DECODE_STEPS + 20
        handles = [self._start(prefix, i, context + more) for i in range(batch)]
        self.handles, self.lengths = (
            ints(handles),
            ints([context + 1 + i % 16 for i in range(batch)]),
        )
        self.tokens = self.handles

    def _start(self, prefix: Ints, index: int, expected: int) -> int:
        prompt = np.concatenate([prefix, np.full(1 + index % 16, 7_000_000 + index, np.int32)])
        handle = self.core.open(prompt, "")
        self.core.claim(handle, expected)
        computed = self.core.hit_tokens(handle)
        while computed < len(prompt):
            computed = min(len(prompt), computed + 2048)
            if self.core.grow(ints([handle]), ints([computed]))[0] < 1:
                raise MemoryError("the pool is too small for this batch and context")
            self.core.advance(ints([handle]), ints([computed]))
        return handle

    def run(self) -> None:
        """Decode; everything but the calls was prepared."""
        for _ in range(DECODE_STEPS):
            self.core.begin_step(self.step)
            self.core.append(self.handles, self.tokens)
            self.lengths += 1
            served, _ = self.core.grow(self.handles, self.lengths)
            if served < len(self.handles):
                raise MemoryError("the pool is too small for this batch and context")
            self.core.advance(self.handles, self.lengths)
            self.step += 1

    def quiet(self) -> None:
        """The same two calls with nothing new: no request crosses a page boundary."""
        for _ in range(DECODE_STEPS):
            self.core.grow(self.handles, self.lengths)
            self.core.advance(self.handles, self.lengths)


class Prefixes:
    """One cached prompt, and prompts nobody has seen."""

    def __init__(self, core: MemoryCore, tokens: int, repeats: int) -> None:
        self.core = core
        self.cached = np.arange(tokens, dtype=np.int32)
        self.fresh = [
            np.arange(tokens, dtype=np.int32) + 7_000_000 * (i + 1) for i in range(repeats)
        ]
        self.handle = 0
        core.close(self._computed(self.cached))

    def _grown(self, prompt: Ints) -> int:
        handle = self.core.open(prompt, "")
        self.core.claim(handle, len(prompt))
        if self.core.grow(ints([handle]), ints([len(prompt)]))[0] < 1:
            raise MemoryError("the pool is too small for this prompt")
        return handle

    def _computed(self, prompt: Ints) -> int:
        handle = self._grown(prompt)
        self.core.advance(ints([handle]), ints([len(prompt)]))
        return handle

    def match(self) -> None:
        """Find how much of the cached prompt could be resumed."""
        self.core.peek(self.cached, "")

    def hit(self) -> None:
        """Find and reference its pages, then give them back."""
        self.core.close(self.core.open(self.cached, ""))

    def prepare_insert(self) -> None:
        """The request whose tokens :meth:`insert` publishes."""
        if self.handle:
            self.core.close(self.handle)
        self.handle = self._grown(self.fresh.pop())
        self.until = ints([len(self.cached)])

    def insert(self) -> None:
        """Put a whole unknown prompt and its pages into the index."""
        self.core.advance(ints([self.handle]), self.until)


def core_of(model: str, pool_bytes: int, implementation: Implementation) -> MemoryCore:
    """An empty core for a model and a pool."""
    return create_core(layout_of(model, pool_bytes), implementation)
