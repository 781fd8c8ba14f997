"""How much of the bytes that running requests hold they still need: token counts and tables.

Needed are: of full attention all tokens, of a sliding window the last window − 1 (the next
token is the window's last), of a chunk those since it began, of a state one; shared tokens once.
The rest is *expired* (behind the window or chunk; a second state), *unfilled* (not written yet)
or *padding* (bytes of a page that belong to no layer).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.managers.peer.job import PeerLayer

Table = tuple[int, Sequence[int | None]]
"""A request's computed tokens, and its pages by position; None where it holds none."""


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
        pages = {page for _, table in tables for page in table if page is not None}
        allocated += len(pages) * page_bytes
        for layer in group.layers:
            part = _layer_bytes(layer, group.page_tokens, tables, len(pages))
            needed, expired, unfilled = needed + part[0], expired + part[1], unfilled + part[2]
    return Held(allocated, needed, expired, unfilled)


def _layer_bytes(
    layer: PeerLayer, page_tokens: int, tables: Sequence[Table], pages: int
) -> tuple[int, int, int]:
    if layer.kind == "state":
        states = sum(any(page is not None for page in table) for _, table in tables)
        return states * layer.state_bytes, max(0, pages - states) * layer.state_bytes, 0
    seen: dict[int, tuple[int, int]] = {}
    for computed, table in tables:
        first = first_needed(layer, computed)
        for position, page in enumerate(table):
            if page is None:
                continue
            low, high = position * page_tokens, min((position + 1) * page_tokens, computed)
            use = max(0, high - max(low, first)), max(0, min(high, first) - low)
            seen[page] = max(seen.get(page, (0, 0)), use)
    needed = sum(use for use, _ in seen.values())
    expired = sum(old for _, old in seen.values())
    rest, each = pages * page_tokens - needed - expired, layer.token_bytes
    return needed * each, expired * each, rest * each
