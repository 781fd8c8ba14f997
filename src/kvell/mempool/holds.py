"""Pages of one instance that are held for somebody, each until a deadline.

::

    hold_text ──► HELD ──claim──► a request of the scheduler
    hold_pages ─►  │ │
                   │ ├─insert──► cached
                   │ └─expire, release, its owner's instance dies ──► gone
                   └─receive──► HELD, with pages for what comes

A hold is a lease of the memory core, which never evicts, moves or withholds its pages.  Pure: time
is told in ticks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvell.memory import HoldingCore, Images, Ints, Tokens
from kvell.mempool.owners import Owner, Tick

FOR_GOOD = (1 << 31) - 1
"""The step until which the memory core leases: deadlines are kept here, in ticks."""


@dataclass
class Hold:
    """One hold.

    :ivar handle: of the memory core.
    :ivar tokens: int32, of its text; empty for pages without one.
    :ivar hit_tokens: of these the ones that were found.
    :ivar root: of its prefix, and ``model`` which of several.
    """

    owner: Owner
    handle: int
    deadline: Tick
    tokens: npt.NDArray[np.int32]
    hit_tokens: int
    root: str = ""
    model: str = ""


class Holds:
    """All holds over one memory core.

    :param core: shared with the scheduler, which closes none of these handles.
    :ivar watch: is told of texts that are cached now, just before.
    """

    def __init__(self, core: HoldingCore) -> None:
        self._core = core
        self._holds: dict[Owner, Hold] = {}
        self.watch: Callable[[Hold], None] | None = None

    def __len__(self) -> int:
        return len(self._holds)

    def __iter__(self) -> Iterator[Hold]:
        return iter(self._holds.values())

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._holds

    def __getitem__(self, owner: Owner) -> Hold:
        return self._holds[owner]

    @property
    def next_deadline(self) -> Tick | None:
        """When the next hold expires; None if there is none."""
        return min((hold.deadline for hold in self._holds.values()), default=None)

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

        :param tokens: int32; at most all but the last are found.
        :param images: int32 [n, 3] as for ``MemoryCore.open``; None without any.
        :raises ValueError: if the owner holds something already, or the images are not in the text.
        """
        self._require_new(owner)
        handle = self._core.open(
            tokens, root, FOR_GOOD, images=images, prompt_tokens=prompt_tokens, model=model
        )
        hit = self._core.hit_tokens(handle)
        text = np.array(tokens, np.int32)
        return self._add(Hold(owner, handle, deadline, text, hit, root, model))

    def hold_pages(
        self, owner: Owner, deadline: Tick, counts: Ints, *, model: str = ""
    ) -> Hold | None:
        """Hold empty pages of each group [groups]; None if there are too few.

        :raises ValueError: if the owner holds something already, or for another model's groups.
        """
        self._require_new(owner)
        handle = self._core.reserve(counts, FOR_GOOD, model=model)
        if not handle:
            return None
        return self._add(Hold(owner, handle, deadline, np.empty(0, np.int32), 0))

    def receive(self, owner: Owner, computed: int) -> Ints | None:
        """Take pages for the first ``computed`` tokens, whose contents are about to come.

        :returns: what is missing [m, 3]: group, position, page; None if there is no room, and
            then the hold is gone.
        :raises ValueError: if the text cannot come in pages (a part of an image, tokens that are
            dropped).
        """
        hold = self._holds[owner]
        if computed <= hold.hit_tokens:
            # Nothing comes.  Its last page would be taken anew, while others may evict this one.
            return np.empty((0, 3), np.int32)
        handle = hold.handle
        self._core.receive(handle, computed)
        one, until = np.asarray([handle], np.int32), np.asarray([computed], np.int32)
        served, rows = self._core.grow(one, until)
        if not served:
            self.release(owner)
            return None
        return rows[:, 1:]

    def pages(self, owner: Owner) -> Ints:
        """All pages that are held [m, 3]: group, position, page; half-full ones and states too."""
        return _pages_held(self._core, self._holds[owner].handle)

    def places(self, owner: Owner) -> dict[tuple[int, int], int]:
        """The same as (group, position) → page."""
        return places_held(self._core, self._holds[owner].handle)

    def adopt(self, owner: Owner, tokens: Tokens, root: str = "") -> None:
        """Make pages without a text those of a text that is wholly computed and in them.

        :raises ValueError: if they are not as many as the text takes in each group.
        """
        hold = self._holds[owner]
        self._core.adopt(hold.handle, tokens, root)
        hold.tokens, hold.root = np.array(tokens, np.int32), root

    def insert(self, owner: Owner, computed: int) -> None:
        """Cache the first ``computed`` tokens, whose contents have come; the hold ends."""
        hold = self._holds.pop(owner)
        if self.watch is not None:
            self.watch(hold)
        one, until = np.asarray([hold.handle], np.int32), np.asarray([computed], np.int32)
        self._core.advance(one, until)
        self._core.close(hold.handle)

    def claim(self, owner: Owner) -> int:
        """End the hold and keep its pages; returns the handle, which is the caller's now."""
        return self._holds.pop(owner).handle

    def extend(self, owner: Owner, deadline: Tick) -> bool:
        """Hold for longer; whether the hold was still there."""
        hold = self._holds.get(owner)
        if hold is not None:
            hold.deadline = max(hold.deadline, deadline)
        return hold is not None

    def release(self, owner: Owner) -> bool:
        """Give the pages back; idempotent.  Whether the hold was still there."""
        hold = self._holds.pop(owner, None)
        if hold is not None:
            self._core.close(hold.handle, renew=False)
        return hold is not None

    def expire(self, now: Tick) -> list[Owner]:
        """Give back what has passed its deadline; returns whose it was."""
        return self._release_where(lambda hold: hold.deadline <= now)

    def instance_died(self, instance: str, incarnation: int) -> list[Owner]:
        """Give back what an incarnation of an instance, or an earlier one, held."""
        return self._release_where(
            lambda hold: hold.owner.instance == instance and hold.owner.incarnation <= incarnation
        )

    def audit(self) -> list[str]:
        """Every contradiction with the memory core, a sentence for each."""
        leases = {h.handle for h in self._core.snapshot().holders if h.is_lease}
        return [
            f"{hold.owner}: handle {hold.handle} is no lease of the core"
            for hold in self._holds.values()
            if hold.handle not in leases
        ]

    def _require_new(self, owner: Owner) -> None:
        if owner in self._holds:
            raise ValueError(f"{owner} holds something already")

    def _add(self, hold: Hold) -> Hold:
        self._holds[hold.owner] = hold
        return hold

    def _release_where(self, is_over: Callable[[Hold], bool]) -> list[Owner]:
        over = [owner for owner, hold in self._holds.items() if is_over(hold)]
        for owner in over:
            self.release(owner)
        return over


def places_held(core: HoldingCore, handle: int) -> dict[tuple[int, int], int]:
    """(group, position) → page of all that a lease holds, half-full ones and states too."""
    return {(group, at): page for group, at, page in _pages_held(core, handle).tolist()}


def _pages_held(core: HoldingCore, handle: int) -> Ints:
    return np.concatenate([core.held_pages(handle)[:, 1:], core.sources(handle)[:, :3]])
