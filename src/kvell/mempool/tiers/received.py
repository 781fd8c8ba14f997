"""Texts of other instances that are received in the buffer, since the pool has no room for them.

::

    Prepare ──the pool is full──► the pages that neither tier has are reserved in the buffer
                                     │ pulled from the sender
                                     ▼
                                  texts of the buffer (:mod:`kvell.mempool.tiers.buffered`)

The pages that a tier has already are not kept meanwhile: a text whose beginning goes is only as
useful as other cached texts.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvell.elastic.page_buffer import first_pages
from kvell.memory import HoldingCore, Ints
from kvell.mempool.owners import Owner
from kvell.mempool.tiers.buffered import BufferedPages, Key
from kvell.mempool.tiers.digests import PrefixDigests, full_root
from kvell.mempool.tiers.lookup import Tiers, served_groups


@dataclass(frozen=True)
class _Reserved:
    """A page that is written by another instance's pull: its key, end and holder."""

    key: Key
    end: int
    holder: int


class ReceivedTexts:
    """The texts that come into the buffer now."""

    def __init__(self, core: HoldingCore, pages: BufferedPages, first_large: int) -> None:
        self._core, self._pages = core, pages
        self._first_page = first_pages(pages.groups, first_large)
        self._coming: dict[Owner, list[_Reserved]] = {}

    def __len__(self) -> int:
        return len(self._coming)

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._coming

    def reserve(
        self, owner: Owner, tokens: npt.NDArray[np.int32], computed: int, root: str, model: str
    ) -> Ints | None:
        """Reserve pages for the first ``computed`` tokens of a text; no step may run.

        :returns: the pages to fill [m, 3]: group, position, page, counted from the pool's first;
            None if there is no room, or the text cannot be in the buffer.
        """
        own = served_groups(self._pages.groups, model)
        if not own or (tokens < 0).any():
            return None
        digests = PrefixDigests(tokens, full_root(root, model))
        tiers = Tiers(self._pages, own, digests, self._core.known(tokens, root, model=model))
        places = list(tiers.places(computed))
        keys = [tiers.key(group, place) for group, _, place in places]
        self._pages.touch(reversed(keys))  # so that no room is made by dropping these
        reserved: list[_Reserved] = []
        rows: list[tuple[int, int, int]] = []
        for page_key, (group, position, place) in zip(keys, places, strict=True):
            if page_key in self._pages or place in tiers.pool[group]:
                continue
            taken = self._pages.reserve(group)
            if taken is None:
                self._give_back(reserved)
                return None
            holder, page = taken
            reserved.append(_Reserved(page_key, place[0], holder))
            rows.append((group, position, self._first_page[group] + page))
        self._coming[owner] = reserved
        return np.asarray(rows, np.int32).reshape(-1, 3)

    def insert(self, owner: Owner) -> None:
        for page in self._coming.pop(owner):
            self._pages.publish(page.key, page.end, page.holder)

    def release(self, owner: Owner) -> None:
        """Free the pages of a text that does not come; idempotent."""
        self._give_back(self._coming.pop(owner, []))

    def _give_back(self, reserved: list[_Reserved]) -> None:
        for page in reserved:
            self._pages.give_back(page.holder)
