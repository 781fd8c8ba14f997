"""The compiled memory core (csrc/memory); :mod:`kvell.prefix.core.compiled` wraps it."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvell.vocabulary import PageId

Ints = npt.NDArray[np.int32]
LongInts = npt.NDArray[np.int64]
Numbers = tuple[int, ...]
Rules = tuple[int, int, int, int, int, bool, bool, bool, int, int, str]
"""(page_tokens, pages_per_large, number of the kind, window_tokens, slices, required_for_hit,
counts_images, holds_embeddings, bytes of a page, tokens that a state must save to displace,
model)."""

def fit(entered: bytes, returned: bytes, events: bytes, bounds: Sequence[int]) -> bytes:
    """Return the worth of chunks by class and age, float64, from counts in float64."""

class CompiledCore:
    """A core that makes the same decisions as ``tests/oracle``.

    An empty ``quota_large_pages`` lets every group take any large page.
    """

    def __init__(
        self,
        groups: Sequence[Rules],
        num_large_pages: int,
        large_page_bytes: int,
        literal_order: bool,
        quota_large_pages: Sequence[int],
        learning: tuple[int, int, int, Sequence[int]] | tuple[()] = (),
        refit: Callable[[bytes, bytes, bytes, int], tuple[bytes, float, int]] | None = None,
    ) -> None: ...
    def begin_step(self, step: int) -> None: ...
    def add_groups(self, groups: Sequence[Rules]) -> None: ...
    def peek(
        self,
        tokens: Ints,
        root: str,
        *,
        images: Ints | None = None,
        prompt_tokens: int | None = None,
        model: str = "",
    ) -> int: ...
    def known(self, tokens: Ints, root: str, *, model: str = "") -> Ints: ...
    def open(
        self,
        tokens: Ints,
        root: str,
        lease_until: int | None = None,
        *,
        reuse: bool = True,
        images: Ints | None = None,
        prompt_tokens: int | None = None,
        model: str = "",
    ) -> int: ...
    def claim(
        self, handle: int, expected_tokens: int, *, will_return: bool | None = None
    ) -> None: ...
    def hit_tokens(self, handle: int) -> int: ...
    def receive(self, handle: int, computed: int) -> None: ...
    def sources(self, handle: int) -> Ints: ...
    def reserve(self, counts: Ints, lease_until: int, *, model: str = "") -> int: ...
    def adopt(
        self, handle: int, tokens: Ints, root: str, *, prompt_tokens: int | None = None
    ) -> None: ...
    def delete(self, tokens: Ints, root: str, *, model: str = "") -> int: ...
    def grow(self, handles: Ints, until: Ints) -> tuple[int, Ints]: ...
    def largest(self, handle: int, until: int) -> int: ...
    def held_pages(self, handle: int) -> Ints: ...
    def fits(
        self, handle: int, until: int, chunk_tokens: int, others: Ints, others_until: Ints
    ) -> bool: ...
    def may_fit(self) -> bool: ...
    def copies(self) -> Ints: ...
    def compact(self, most_large: int) -> Ints: ...
    def checkpoint(self, handles: Ints, until: Ints) -> Ints: ...
    def append(self, handles: Ints, tokens: Ints) -> None: ...
    def advance(self, handles: Ints, computed: Ints) -> None: ...
    def close(self, handle: int, *, renew: bool = True, returns: bool = False) -> None: ...
    def send_away(self, handle: int, away_tokens: int) -> None: ...
    def reclaim_order(self) -> LongInts: ...
    def withhold(self, larges: Ints) -> None: ...
    def restore(self, larges: Ints) -> None: ...
    def watch_index(self) -> None: ...
    def index_changes(self) -> Ints: ...
    def empty_large_pages(self) -> int: ...
    def evicted_pages(self) -> tuple[int, ...]: ...
    def large_rows(self) -> LongInts: ...
    def small_rows(self, large: int) -> LongInts: ...
    def reach(
        self,
        tokens: Ints,
        root: str,
        *,
        images: Ints | None = None,
        prompt_tokens: int | None = None,
        model: str = "",
    ) -> LongInts: ...
    def division(
        self,
    ) -> tuple[
        int, Numbers, Numbers, Numbers, int, Numbers, Numbers, Numbers, Numbers, Numbers
    ]: ...
    def state(
        self,
    ) -> tuple[
        tuple[Numbers, Numbers, Numbers, Numbers, Numbers],
        tuple[
            tuple[dict[int, int], ...],
            tuple[dict[int, tuple[int, int, int]], ...],
            tuple[tuple[int, PageId, int, int, int, int], ...],
        ],
        int,
        Numbers,
        tuple[
            tuple[
                int,
                int,
                int,
                bool,
                tuple[tuple[int, Numbers], ...],
                tuple[tuple[int, int], ...],
                bool,
                bool,
                int,
            ],
            ...,
        ],
        int,
        Numbers,
        int,
        Numbers,
        Numbers,
    ]: ...
