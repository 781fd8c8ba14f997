"""Pages of one instance that are held for an owner, each until a deadline.

::

    hold_text ──► HELD ──claim──► a request of the scheduler
    hold_pages ─►  │ │
                   │ ├─insert──► cached
                   │ └─expire, release, its owner's instance dies ──► freed
                   └─receive──► HELD, with pages for the tokens that arrive

A hold is a lease of the memory core, which never evicts, moves or withholds its pages.  This
module does no I/O; callers pass the time in ticks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvell.memory import HoldingCore, Images, Ints, Tokens
from kvell.mempool.owners import Owner, Tick
from kvell.vocabulary import PageId

FOR_GOOD = (1 << 31) - 1
"""The last step of all leases in the memory core, never reached: ``Holds`` keeps the deadlines."""


@dataclass
class Hold:
    """One hold.

    :ivar tokens: the tokens of its text, int32; empty for pages without a text.
    """

    owner: Owner
    handle: int
    deadline: Tick
    tokens: npt.NDArray[np.int32]
    hit_tokens: int
    root: str = ""
    model: str = ""


class Holds(dict[Owner, Hold]):
    """All holds over one memory core that have not ended, by owner.

    :param core: shared with the scheduler, which closes none of these handles.
    :ivar watch: called with each received text just before it is cached.
    """

    def __init__(self, core: HoldingCore) -> None:
        super().__init__()
        self._core = core
        self.watch: Callable[[Hold], None] | None = None

    @property
    def next_deadline(self) -> Tick | None:
        """The time at which the next hold expires, or None."""
        return min((hold.deadline for hold in self.values()), default=None)

    def hold_text(
        self,
        owner: Owner,
        deadline: Tick,
        tokens: Tokens,
        root: str = "",
        *,
        images: Images | None = None,
        prompt_tokens: int | None = None,
        model: str = "",
    ) -> Hold:
        """Hold the longest prefix of a text that every layer group can resume from.

        :param tokens: int32; all but the last can be matched.
        :param images: int32 [n, 3], as for ``MemoryCore.open``.
        :raises ValueError: if the owner has a hold already, or the images are not in the text.
        """
        self._require_new(owner)
        handle = self._core.open(
            tokens, root, FOR_GOOD, images=images, prompt_tokens=prompt_tokens, model=model
        )
        hit = self._core.hit_tokens(handle)
        text = np.array(tokens, np.int32)
        hold = self[owner] = Hold(owner, handle, deadline, text, hit, root, model)
        return hold

    def hold_pages(
        self, owner: Owner, deadline: Tick, counts: Ints, *, model: str = ""
    ) -> Hold | None:
        """Hold empty pages of each group [groups], or return None if there are too few.

        :raises ValueError: if the owner has a hold already, or for another model's groups.
        """
        self._require_new(owner)
        handle = self._core.reserve(counts, FOR_GOOD, model=model)
        if not handle:
            return None
        hold = self[owner] = Hold(owner, handle, deadline, np.empty(0, np.int32), 0)
        return hold

    def receive(self, owner: Owner, computed: int) -> Ints | None:
        """Allocate pages for the first ``computed`` tokens, whose contents are about to arrive.

        :returns: the pages to fill [m, 3]: group, position, page; None if there is no room, and
            then the hold is released.
        :raises ValueError: if the text cannot be received in pages (a part of an image, dropped
            tokens).
        """
        hold = self[owner]
        if computed <= hold.hit_tokens:
            # Nothing arrives. ``receive`` would allocate a new last page and make this evictable.
            return np.empty((0, 3), np.int32)
        handle = hold.handle
        self._core.receive(handle, computed)
        handles, until = np.asarray([handle], np.int32), np.asarray([computed], np.int32)
        served, rows = self._core.grow(handles, until)
        if not served:
            self.release(owner)
            return None
        return rows[:, 1:]

    def pages(self, owner: Owner) -> Ints:
        """Return all held pages and states, full or not [m, 3]: group, position, page."""
        return _pages_held(self._core, self[owner].handle)

    def places(self, owner: Owner) -> dict[tuple[int, int], PageId]:
        """Return the result of :meth:`pages` as (group, position) → page."""
        return places_held(self._core, self[owner].handle)

    def adopt(self, owner: Owner, tokens: Tokens, root: str = "") -> None:
        """Assign held pages, which contain the computed tokens of a text, to that text.

        :raises ValueError: if a group has another number of pages than the text needs.
        """
        hold = self[owner]
        self._core.adopt(hold.handle, tokens, root)
        hold.tokens = np.array(tokens, np.int32)
        hold.root = root

    def insert(self, owner: Owner, computed: int) -> None:
        """Cache the first ``computed`` tokens, whose contents have arrived, and end the hold."""
        hold = self.pop(owner)
        if self.watch is not None:
            self.watch(hold)
        handles, until = np.asarray([hold.handle], np.int32), np.asarray([computed], np.int32)
        self._core.advance(handles, until)
        self._core.close(hold.handle)

    def claim(self, owner: Owner) -> int:
        """End the hold, keep its pages and return its handle, which the caller then owns."""
        return self.pop(owner).handle

    def release(self, owner: Owner) -> bool:
        """Release the pages and return whether the hold still existed. Idempotent."""
        hold = self.pop(owner, None)
        if hold is not None:
            self._core.close(hold.handle, renew=False)
        return hold is not None

    def release_where(self, is_over: Callable[[Hold], bool]) -> list[Owner]:
        over = [owner for owner, hold in self.items() if is_over(hold)]
        for owner in over:
            self.release(owner)
        return over

    def _require_new(self, owner: Owner) -> None:
        if owner in self:
            raise ValueError(f"{owner} holds something already")


def places_held(core: HoldingCore, handle: int) -> dict[tuple[int, int], PageId]:
    """Return all pages of a lease by (group, position), with partly filled ones and states."""
    return {(group, at): page for group, at, page in _pages_held(core, handle).tolist()}


def _pages_held(core: HoldingCore, handle: int) -> Ints:
    return np.concatenate([core.held_pages(handle)[:, 1:], core.sources(handle)[:, :3]])
