"""Holders: who references pages. A running request is one; so is a lease.

A lease::

    open(lease_until) ──► LEASED ──claim──► REQUEST ──close──► gone
                            │ expire(step)
                            └──────────────► gone
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvell.prefix.eviction.checkpoints import Sort
from kvell.prefix.eviction.hazard import Run
from kvell.prefix.groups.facts import Facts
from kvell.prefix.index.radix import Node, Place, Tokens


@dataclass
class GroupPages:
    """A holder's pages in one group: positions ``first … first+len(pages)-1``.

    :ivar published: positions before this one are in the index, or not to be.
    :ivar returned_to: pages at positions before this one came home from another instance since the
        last :meth:`MemoryCore.advance`: the index does not know them.
    :ivar sources: cached pages that new pages of the holder are copied from, by position,
        each with its place in the index; held until the copies are made.
    """

    first: int
    pages: list[int]
    published: int = 0
    returned_to: int = 0
    sources: dict[int, tuple[Place, int]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Page position after the last one held."""
        return self.first + len(self.pages)

    def add(self, pages: list[int], before: int) -> list[int]:
        """Hold new pages, ``before`` of them in front of the others; returns their positions."""
        first, end = self.first, self.end
        if before:
            self.returned_to = max(self.returned_to, first)
            self.first -= before
        self.pages = [*pages[:before], *self.pages, *pages[before:]]
        return [*range(first - before, first), *range(end, end + len(pages) - before)]


@dataclass(frozen=True)
class Checkpoint:
    """Pages that a step writes a state to, for the index: the state after ``end`` tokens."""

    group: int
    end: int
    sort: Sort
    rank: int
    pages: tuple[int, ...]


@dataclass
class Holder:
    """Tokens, how many of them are computed, and the pages that hold them.

    :ivar matched_tokens: how far the tokens were known to the index when it was opened.
    :ivar will_return: its client's hint.
    :ivar runs: classes of its prefixes, once it ends.
    :ivar is_claimed: whether a request has begun with it.
    :ivar is_over: whether it is giving everything back.
    :ivar is_receiving: what it has computed comes from elsewhere, and may not be there yet.
    :ivar is_reservation: its pages belong to no text yet.
    :ivar renewed_step: when what its later turns resume from was last counted as accessed.
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
        """Tokens it was opened with, and generated ones."""
        return len(self.tokens) + len(self.generated)

    def own_groups(self) -> Iterator[tuple[int, GroupPages]]:
        """The groups of its model, and its pages there."""
        return ((index, self.groups[index]) for index in self.own)

    def tokens_to(self, end: int) -> Tokens:
        """The first ``end`` tokens, int32."""
        if end <= len(self.tokens):
            return self.tokens[:end]
        tail = np.asarray(self.generated[: end - len(self.tokens)], np.int32)
        return np.concatenate([self.tokens, tail])
