"""The contents of an engine's pool, page by page, for the instance protocol."""

from collections.abc import Sequence

import numpy as np

from kvell.engine.core.core import EngineCore
from kvell.engine.protocol.pages import (
    MOST_OWNERS,
    LargePage,
    PageGroup,
    PageOwner,
    Pages,
)
from kvell.engine.requests.request import Request
from kvell.memory import GroupKind, GroupSpec, VisibleCore
from kvell.pages.rows import LargePageRow, NewPageRow, PageRow, SmallPageRow


class PageMap:
    """A read-only view of an engine core's pages."""

    def __init__(self, core: EngineCore, memory: VisibleCore) -> None:
        self._core, self.memory = core, memory

    def pages(self, incarnation: int) -> Pages:
        rows = self.memory.large_pages()
        return Pages(
            incarnation,
            self._core.step,
            tuple(_page_group(group) for group in self.memory.layout.groups),
            rows[:, LargePageRow.GROUP].astype("<i2").tobytes(),
            rows[:, LargePageRow.USED].astype("<u4").tobytes(),
            rows[:, LargePageRow.CACHED].astype("<u4").tobytes(),
            _ages(rows[:, LargePageRow.STEP], self._core.step).astype("<u4").tobytes(),
            self._core.latest_misses,
            self._lent(len(rows)),
        )

    def _lent(self, num_large: int) -> bytes:
        """Return the number of lent small pages in each large page; empty if none is lent."""
        rows = self._core.pool.lent_pages()
        groups = self.memory.layout.groups
        if not len(rows):
            return b""
        sizes = np.asarray([group.pages_per_large for group in groups])
        numbers = rows[:, PageRow.PAGE] // sizes[rows[:, PageRow.GROUP]]
        return np.bincount(numbers, minlength=num_large).astype("<u4").tobytes()

    def large_page(self, number: int) -> LargePage:
        """Return one large page and its owners; empty if no large page has that number."""
        if not 0 <= number < self.memory.layout.num_large_pages:
            return LargePage(number, self._core.step)
        group, used, cached, step = self.memory.large_pages()[number].tolist()
        if group < 0:
            return LargePage(number, self._core.step, group)
        spec = self.memory.layout.groups[group]
        small = self.memory.small_pages(number)
        ends = small[small[:, SmallPageRow.USERS] == 0, SmallPageRow.END]
        ends = ends[ends > 0]
        owned, owners = self._owners(number, group, spec)
        return LargePage(
            number,
            self._core.step,
            group,
            used,
            cached,
            spec.pages_per_large - used - cached,
            int(_ages(np.asarray([step]), self._core.step)[0]),
            tuple(owners[:MOST_OWNERS]),
            max(0, len(owners) - MOST_OWNERS),
            max(0, used - owned),
            tuple(np.unique(ends).tolist()[:MOST_OWNERS]),
        )

    def _owners(self, number: int, group: int, spec: GroupSpec) -> tuple[int, list[PageOwner]]:
        """Return the number of pages that running requests hold, and the owners, most first."""
        first = number * spec.pages_per_large
        owned: set[int] = set()
        owners = []
        for request in self._core.running:
            held = self.memory.held_pages(request.handle)
            pages = held[:, NewPageRow.PAGE]
            is_here = (held[:, NewPageRow.GROUP] == group) & (pages >= first)
            here = held[is_here & (pages < first + spec.pages_per_large)]
            if len(here):
                owned.update(here[:, NewPageRow.PAGE].tolist())
                owners.append(_owner(request, spec, here[:, NewPageRow.POSITION].tolist()))
        owners.sort(key=lambda owner: (-owner.pages, owner.request_id))
        return len(owned), owners


def _owner(request: Request, spec: GroupSpec, positions: Sequence[int]) -> PageOwner:
    if spec.kind is GroupKind.STATE:
        return PageOwner(request.request_id, len(positions), 0, request.computed)
    first = min(positions)
    end = max(positions) + 1
    size = spec.page_tokens
    return PageOwner(
        request.request_id,
        len(positions),
        first * size,
        min(end * size, max(request.num_tokens, first * size + 1)),
    )


def _page_group(group: GroupSpec) -> PageGroup:
    return PageGroup(
        group.name,
        str(group.kind.value),
        len(group.layers),
        group.page_tokens,
        group.page_stride_bytes,
        group.pages_per_large,
    )


def _ages(
    steps: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]", now: int
) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    """Return the age of each step; 0 if there is no step, or it is in the future."""
    return np.where(steps < 0, 0, np.maximum(0, now - steps))
