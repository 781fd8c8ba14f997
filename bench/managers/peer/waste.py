"""How much of the bytes that running requests hold they still need: token counts and tables.

Needed are: of full attention all tokens, of a sliding window the last window − 1 (the next
token is the window's last), of a chunk those since it began, of a state one; shared tokens once.
The rest is *expired* (behind the window or chunk; a second state), *unfilled* (not written yet)
or *padding* (bytes of a page that belong to no layer).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.managers.peer.job import PeerLayer

Table = tuple[int, Sequence[int | None]]
"""A request's computed tokens, and its pages by position; None where it holds none."""
Numbers = np.ndarray[Any, np.dtype[np.int64]]
NONE = -1
"""For None, in arrays."""


@dataclass(frozen=True)
class Held:
    """Bytes held, and what they are: ``padding`` is the rest."""

    allocated: int
    needed: int
    expired: int
    unfilled: int

    @property
    def padding(self) -> int:
        """Bytes that belong to no layer."""
        return self.allocated - self.needed - self.expired - self.unfilled

    def parts(self) -> tuple[float, float, float, float]:
        """Waste, and its parts expired, unfilled and padding, of what is allocated."""
        whole = max(1, self.allocated)
        each = (self.allocated - self.needed, self.expired, self.unfilled, self.padding)
        return (each[0] / whole, each[1] / whole, each[2] / whole, each[3] / whole)


@dataclass(frozen=True)
class PeerGroup:
    """Layers that share tables of pages.

    :param page_tokens: tokens of a page; of states, nothing is read from it.
    """

    layers: tuple[PeerLayer, ...]
    page_tokens: int


def first_needed(layer: PeerLayer, computed: int) -> int:
    """First of the computed tokens that the next token still reads."""
    if layer.kind == "sliding":
        return max(0, computed - layer.window_tokens + 1)
    if layer.kind == "chunked":
        return computed // layer.window_tokens * layer.window_tokens
    return 0


def held(groups: Iterable[tuple[PeerGroup, Sequence[Table]]], page_bytes: int) -> Held:
    """What running requests hold in all groups; a page takes ``page_bytes`` in any of them."""
    allocated = needed = expired = unfilled = 0
    for group, tables in groups:
        numbers = [(computed, _numbers(table)) for computed, table in tables]
        every = [pages[pages != NONE] for _, pages in numbers]
        num_pages = len(np.unique(np.concatenate(every))) if every else 0
        allocated += num_pages * page_bytes
        for layer, count in Counter(group.layers).items():
            part = _layer_bytes(layer, group.page_tokens, numbers, num_pages)
            needed += part[0] * count
            expired += part[1] * count
            unfilled += part[2] * count
    return Held(allocated, needed, expired, unfilled)


def _numbers(table: Sequence[int | None]) -> Numbers:
    return np.fromiter((NONE if page is None else page for page in table), np.int64, len(table))


def _layer_bytes(
    layer: PeerLayer, page_tokens: int, tables: Sequence[tuple[int, Numbers]], num_pages: int
) -> tuple[int, int, int]:
    if layer.kind == "state":
        states = sum(bool((pages != NONE).any()) for _, pages in tables)
        return states * layer.state_bytes, max(0, num_pages - states) * layer.state_bytes, 0
    needed, expired = _tokens(layer, page_tokens, tables)
    rest, each = num_pages * page_tokens - needed - expired, layer.token_bytes
    return needed * each, expired * each, rest * each


def _tokens(
    layer: PeerLayer, page_tokens: int, tables: Sequence[tuple[int, Numbers]]
) -> tuple[int, int]:
    """Needed and expired tokens; a shared page counts once, as its neediest user has it."""
    pages_of, uses_of = [], []
    for computed, pages in tables:
        first = first_needed(layer, computed)
        low = np.arange(len(pages), dtype=np.int64) * page_tokens
        high = np.minimum(low + page_tokens, computed)
        needed = np.maximum(high - np.maximum(low, first), 0)
        expired = np.maximum(np.minimum(high, first) - low, 0)
        is_held = pages != NONE
        pages_of.append(pages[is_held])
        uses_of.append((needed * (page_tokens + 1) + expired)[is_held])
    if not pages_of:
        return 0, 0
    names, places = np.unique(np.concatenate(pages_of), return_inverse=True)
    most = np.zeros(len(names), np.int64)
    np.maximum.at(most, places, np.concatenate(uses_of))
    needed, expired = np.divmod(most, page_tokens + 1)
    return int(needed.sum()), int(expired.sum())
