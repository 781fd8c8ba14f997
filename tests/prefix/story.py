"""A memory core driven in a few words, and audited after each."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvell.memory import Layout, create_core
from kvell.pages.audit import audit
from kvell.pages.snapshot import PoolSnapshot

Ints = npt.NDArray[np.int32]
Rows = list[tuple[int, int, int, int]]


def ints(values: Sequence[int] = ()) -> Ints:
    return np.asarray(values, np.int32)


class Story:
    """Time, requests and their tokens over one core."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.core = create_core(layout)
        self.step = 0
        self.tokens: dict[int, list[int]] = {}

    def next_step(self, steps: int = 1) -> None:
        self.step += steps
        self.core.begin_step(self.step)
        self.check()

    def open(self, tokens: Sequence[int], *, root: str = "", expected: int | None = None) -> int:
        """A running request; what it hits is already its own."""
        handle = self.core.open(ints(tokens), root)
        self.core.claim(handle, len(tokens) if expected is None else expected)
        self.tokens[handle] = list(tokens)
        self.check()
        return handle

    def grow(self, handle: int, until: int) -> Rows:
        """Pages for tokens up to ``until``, which there must be."""
        served, rows = self.core.grow(ints([handle]), ints([until]))
        assert served == 1, f"no room for {until} tokens"
        return [(r[0], r[1], r[2], r[3]) for r in rows.tolist()]

    def compute(self, handle: int, until: int) -> Rows:
        rows = self.grow(handle, until)
        self.core.advance(ints([handle]), ints([until]))
        self.check()
        return rows

    def decode(self, handle: int, token: int) -> Rows:
        self.next_step()
        self.core.append(ints([handle]), ints([token]))
        self.tokens[handle].append(token)
        return self.compute(handle, len(self.tokens[handle]))

    def close(self, handle: int) -> None:
        self.core.close(handle)
        del self.tokens[handle]
        self.check()

    def serve(self, tokens: Sequence[int], *, root: str = "") -> int:
        """A request from prompt to end, in one step; returns the tokens it hit."""
        self.next_step()
        handle = self.open(tokens, root=root)
        hit = self.core.hit_tokens(handle)
        self.compute(handle, len(tokens))
        self.close(handle)
        return hit

    def peek(self, tokens: Sequence[int], root: str = "") -> int:
        return self.core.peek(ints(tokens), root)

    def pages(self, handle: int, group: int) -> dict[int, int]:
        rows = self.core.held_pages(handle).tolist()
        return {position: page for _, g, position, page in rows if g == group}

    def check(self) -> PoolSnapshot:
        state = self.core.snapshot()
        assert audit(self.layout, state) == []
        return state
