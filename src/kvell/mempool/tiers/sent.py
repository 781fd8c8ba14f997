"""Texts that another instance reads from the pool and from the buffer, wherever a page is.

::

    pool     page 0  page 1                       held by a lease
    buffer                   page 2  page 3       kept in the buffer's ledger
                                                  nothing is brought into the pool to be sent

The buffer follows the pool in the same memory, so the numbers of its pages continue the pool's.
"""

from kvell.elastic.page_buffer import first_pages
from kvell.memory import HoldingCore
from kvell.mempool.holds import Hold, Holds
from kvell.mempool.owners import Owner
from kvell.mempool.tiers.buffered import BufferedPages, KeptPages, Key
from kvell.mempool.tiers.digests import PrefixDigests, full_root
from kvell.mempool.tiers.lookup import Tiers, served_groups
from kvell.vocabulary import PageId

Places = dict[tuple[int, int], PageId]
"""Pages by (group, position)."""


class SentTexts:
    """The texts in both tiers that other instances read now.

    :param holds: the holds over ``core``; a text has one there as long as it is read.
    """

    def __init__(
        self, core: HoldingCore, holds: Holds, pages: BufferedPages, first_large: int
    ) -> None:
        self._core, self._holds, self._pages = core, holds, pages
        self._first_page = first_pages(pages.groups, first_large)
        self._read: dict[Owner, KeptPages] = {}
        self._places: dict[Owner, Places] = {}

    def __len__(self) -> int:
        return len(self._read)

    def extend(self, owner: Owner) -> None:
        """Let a hold of a text end where both tiers together end, if that is later.

        The text has an appended token, as for :func:`.copies.whole`.
        """
        hold = self._holds[owner]
        own = served_groups(self._pages.groups, hold.model)
        if not len(self._pages) or not own or (hold.tokens < 0).any():
            return
        digests = PrefixDigests(hold.tokens, full_root(hold.root, hold.model))
        indexed = self._core.known(hold.tokens, hold.root, model=hold.model)
        tiers = Tiers(self._pages, own, digests, indexed)
        if tiers.longest <= hold.hit_tokens:
            return
        self._core.receive(hold.handle, tiers.longest)  # pages of the pool after the hit
        if self._take(hold, tiers):
            return
        # A lease cannot hold a page of the pool behind a missing one.
        self._holds.release(owner)
        hold = self._holds.hold_text(owner, hold.deadline, hold.tokens, hold.root, model=hold.model)
        held = self._holds.places(owner)
        is_held = [
            held.get((group, position)) == page for group, position, page, _ in indexed.tolist()
        ]
        tiers = Tiers(self._pages, own, digests, indexed[is_held])
        if tiers.longest > hold.hit_tokens:
            self._take(hold, tiers)

    def places(self, owner: Owner) -> Places:
        """Return the pages of a text in both tiers; those of a hold alone are in the pool."""
        return self._places.get(owner) or self._holds.places(owner)

    def release(self, owner: Owner) -> None:
        """Let the buffer's pages of a text go; idempotent."""
        self._places.pop(owner, None)
        read = self._read.pop(owner, None)
        if read is not None:
            self._pages.end_read(read)

    def _take(self, hold: Hold, tiers: Tiers) -> bool:
        """Keep all pages for the longest length of ``tiers``; return whether that is possible."""
        in_pool = self._holds.places(hold.owner)
        places: Places = {}
        keys: list[Key] = []
        for group, position, place in tiers.places(tiers.longest):
            page = tiers.pool[group].get(place)
            if page is not None and in_pool.get((group, position)) == page:
                places[group, position] = page
            elif tiers.is_buffered(group, place):
                keys.append(tiers.key(group, place))
                places[group, position] = PageId(
                    self._first_page[group] + self._pages.page(keys[-1])
                )
            else:
                return False
        hold.hit_tokens = tiers.longest
        self._pages.touch(reversed(keys))
        self._read[hold.owner] = self._pages.begin_read(keys)
        self._places[hold.owner] = places
        return True
