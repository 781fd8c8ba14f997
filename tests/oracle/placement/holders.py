"""Holders, which reference pages: running requests and leases.

A lease::

    open(lease_until) ──► LEASED ──claim──► REQUEST ──close──► gone
                            │ expire(step)
                            └──────────────► gone
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvell.prefix.groups.facts import Facts
from kvell.prefix.tokens import Tokens
from tests.oracle.eviction.checkpoints import Sort
from tests.oracle.eviction.hazard import Run
from tests.oracle.index.radix import Node, Place


@dataclass
class GroupPages:
    """A holder's pages in one group: positions ``first … first+len(pages)-1``.

    :ivar published: positions before this one are in the index, or must not be.
    :ivar returned_to: pages at positions before this one were copied back from another instance
        since the last :meth:`MemoryCore.advance` and are not in the index.
    :ivar sources: cached pages to copy to new pages of the holder, by position, each with its
        place in the index; held until the copies are made.
    """

    first: int
    pages: list[int]
    published: int = 0
    returned_to: int = 0
    sources: dict[int, tuple[Place, int]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The page position after the last one held."""
        return self.first + len(self.pages)

    def add(self, pages: list[int], before: int) -> list[int]:
        """Add new pages, ``before`` of them before the held ones, and return their positions."""
        first, end = self.first, self.end
        if before:
            self.returned_to = max(self.returned_to, first)
            self.first -= before
        self.pages = [*pages[:before], *self.pages, *pages[before:]]
        return [*range(first - before, first), *range(end, end + len(pages) - before)]


@dataclass(frozen=True)
class Checkpoint:
    """The pages to which a step writes the state after ``end`` tokens, for the index."""

    group: int
    end: int
    sort: Sort
    rank: int
    pages: tuple[int, ...]


@dataclass
class Holder:
    """The tokens and pages of a request or lease.

    :ivar matched_tokens: the indexed tokens of its prompt when it was opened.
    :ivar will_return: the client's hint.
    :ivar runs: the classes of its prefixes, once it ends.
    :ivar is_claimed: whether :meth:`MemoryCore.claim` was called.
    :ivar is_over: whether it is releasing its pages.
    :ivar is_receiving: whether its computed tokens come from elsewhere and may still be missing.
    :ivar is_reservation: whether its pages belong to no text yet.
    :ivar renewed_step: the step at which its resume points last counted as accessed.
    """

    handle: int
    root: str
    tokens: Tokens
    facts: Facts
    own: tuple[int, ...]
    node: Node
    groups: list[GroupPages]
    hit_tokens: int
    matched_tokens: int
    expected_tokens: int
    lease_until: int | None
    computed: int = 0
    published: int = 0
    renewed_step: int = 0
    will_return: bool | None = None
    runs: Sequence[Run] = ()
    is_claimed: bool = False
    is_over: bool = False
    is_receiving: bool = False
    is_reservation: bool = False
    generated: list[int] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.computed = self.published = self.hit_tokens

    @property
    def num_tokens(self) -> int:
        """The number of tokens at opening plus generated ones."""
        return len(self.tokens) + len(self.generated)

    def own_groups(self) -> Iterator[tuple[int, GroupPages]]:
        return ((index, self.groups[index]) for index in self.own)

    def tokens_to(self, end: int) -> Tokens:
        """Return the first ``end`` tokens, int32."""
        if end <= len(self.tokens):
            return self.tokens[:end]
        tail = np.asarray(self.generated[: end - len(self.tokens)], np.int32)
        return np.concatenate([self.tokens, tail])
