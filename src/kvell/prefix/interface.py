"""The memory core's interface: page pool, page tables and prefix index behind batch calls.

Time is the step number.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvell.pages.layout import GroupSpec, Layout
from kvell.pages.snapshot import PoolSnapshot, PoolTotals
from kvell.prefix.groups.facts import Images
from kvell.prefix.tokens import Tokens

Ints = npt.NDArray[np.int32]
"""An array of int32; docstrings say its shape."""
LongInts = npt.NDArray[np.int64]
"""An array of int64; docstrings say its shape."""


WITHHELD = 0
EMPTY = 1
CACHED = 2
USED = np.iinfo(np.int64).max
"""States of a large page, in the order of reclaiming: withheld from the core; empty; with cached
pages but no used one (this value or more, by age); in use."""
RANK_SHIFT = 40
"""The shift of the rank in the state of a cached large page, ``CACHED + (rank << RANK_SHIFT) +
time``.  Rank and time are those of its youngest page."""

WITHHELD_GROUP, NO_STEP, NO_END, NO_REACH = -2, -1, -1, -1


NAMED, DROPPED, MOVED = 0, 1, 2
"""Changes of the index: a page gets a name, loses its name, or gets another number."""


class MemoryCore(Protocol):
    """A memory core with one call per step for a whole batch, for schedulers and the simulator.

    Handles name holders (requests and leases) and are never reused.  Batch arguments (``handles``,
    ``until``, ``computed``) are int32 [n], one item per holder; ``until`` and ``computed`` count
    tokens from the start of the text.  Every call leaves the core consistent; a call that raises
    has changed nothing.
    """

    @property
    def layout(self) -> Layout:
        """The groups and the pool that the core serves."""
        ...

    def begin_step(self, step: int) -> None:
        """Set the step number, which only grows, and close expired leases."""
        ...

    def register(self, groups: Sequence[GroupSpec]) -> None:
        """Serve another model's groups from the same pool; the large page keeps its size.

        :raises ValueError: if a group's pages do not divide the large page, its model is in the
            pool already, or the pool was cut into shares at start.
        """
        ...

    def peek(
        self,
        tokens: Tokens,
        root: str,
        *,
        images: Images | None = None,
        prompt_tokens: int | None = None,
        model: str = "",
    ) -> int:
        """Return the length in tokens at which such a request would resume.

        The call changes nothing. Arguments are those of :meth:`open`.
        """
        ...

    def known(self, tokens: Tokens, root: str, *, model: str = "") -> Ints:
        """Return all indexed pages of a text [m, :class:`.SourceRow`], sorted; may have holes.

        The rows are pages of tokens (partly filled if the last column is not a multiple of the page
        size) and states (their position is the slice), but no pages of images.  The call changes
        nothing and takes time linear in the text.

        :raises ValueError: if no group belongs to the model.
        """
        ...

    def open(
        self,
        tokens: Tokens,
        root: str,
        lease_until: int | None = None,
        *,
        reuse: bool = True,
        images: Images | None = None,
        prompt_tokens: int | None = None,
        model: str = "",
    ) -> int:
        """Match and hold the longest prefix that can be resumed; return a handle.

        At least the last token is left to compute.  Without ``reuse`` all tokens are, and all
        cached pages without a user are evicted first, so that the holder's pages are as dense as
        the contract assumes. Without a lease the caller must not change the tokens until the holder
        is claimed or gets pages: only then they are copied. With ``lease_until`` the pages are
        returned automatically after that step unless the lease is claimed.

        :param tokens: the request's tokens so far, at least one.
        :param root: requests share prefixes only within one root (adapter, salt).
        :param lease_until: the last step of a lease; None for a request.
        :param images: int32 [n, 3]: first token in the text, tokens there, image tokens. The ids of
            an image's tokens in the text identify its content.
        :param prompt_tokens: the length of the prompt, if some of the tokens were generated.
        :raises ValueError: if no group belongs to the model, or images overlap.
        """
        ...

    def claim(self, handle: int, expected_tokens: int, *, will_return: bool | None = None) -> None:
        """Turn a lease into a request.

        :param expected_tokens: the expected tokens of prompt and answer together.
        :param will_return: the client's hint whether its conversation continues; None for no hint.
        """
        ...

    def hit_tokens(self, handle: int) -> int:
        """Return the number of tokens in the handle's prefix hit."""
        ...

    def receive(self, handle: int, computed: int) -> None:
        """Resume a just opened holder after ``computed`` tokens whose contents come from elsewhere.

        The holder needs pages only for tokens that a later step reads.  It keeps those pages of its
        prefix hit.  It also takes the indexed whole pages and image pages after the hit, in each
        group up to the first missing one.  Later pages of tokens, and states and partly filled
        pages that end at ``computed``, are kept by a request as :meth:`sources` of
        :meth:`copies`; a lease leaves them.  :meth:`grow` gives all other pages.  The caller fills
        the pages that are not copied before the next step.  No received content is published before
        that step's :meth:`advance`, whatever happens.

        A lease may have all of its tokens computed: after :meth:`advance` to all tokens and
        :meth:`close`, the received content is in the index without a step.

        :raises ValueError: if the holder has new pages, drops tokens, or has images among the
            tokens of its pages; if ``computed`` cuts an image, is less than the hit, or exceeds
            the holder's tokens, of which a request must leave the last to compute.
        """
        ...

    def send_away(self, handle: int, away_tokens: int) -> None:
        """Record that a request's first ``away_tokens`` tokens are remote in full attention groups.

        More than before: their local pages lose their user and are evicted first, but can be hit.
        Fewer: the next :meth:`grow` also gives empty pages for the tokens that are copied back, and
        the next :meth:`advance` indexes them in holes.  Source: Infinite-LLM §4.2.

        :raises ValueError: if the number is negative, exceeds the computed tokens or ends inside a
            page; if the holder is a lease or reservation; if it has :meth:`sources`, unless all of
            them are moved pages and no token is copied back; if its model has no full attention,
            drops tokens or counts images in pages of the text.
        """
        ...

    def sources(self, handle: int) -> Ints:
        """Return the cached pages that a holder keeps for pending copies [m, :class:`.SourceRow`].

        They are partly filled pages, states, and pages after a hole.  Pages from which
        :meth:`compact` moved are among them, with 0 tokens.
        """
        ...

    def grow(self, handles: Ints, until: Ints) -> tuple[int, Ints]:
        """Give the holders pages for tokens 0 … until-1, jointly over groups.

        The call serves the longest feasible run of ``handles`` from the front.

        :returns: the number of handles served, and the new pages [m, :class:`.NewPageRow`].
        """
        ...

    def largest(self, handle: int, until: int) -> int:
        """Return the largest length ≤ ``until`` that :meth:`grow` could give the holder now."""
        ...

    def held_pages(self, handle: int) -> Ints:
        """Return all pages of a holder [m, :class:`.NewPageRow`]; their handle is 0."""
        ...

    def fits(
        self, handle: int, until: int, chunk_tokens: int, others: Ints, others_until: Ints
    ) -> bool:
        """Return whether the holder could reach ``until`` tokens in chunks of ``chunk_tokens``
        while each of ``others`` still gets its pages for ``others_until``.

        :param others: handles of running requests, int32 [n].
        :param others_until: their numbers of tokens in the next step, int32 [n].
        """
        ...

    def may_fit(self) -> bool:
        """Return whether a retry of the last rejected request can succeed.

        That request was opened without a lease or images, :meth:`fits` returned False, and it was
        closed.  The result is False only if :meth:`fits` would certainly return False again, with
        the same or more other requests, grown since.  The call saves the usual repeated rejection
        of one waiting request at every step.
        """
        ...

    def copies(self) -> Ints:
        """Return the copies that initialize pages given since the last call [m, 4].

        Columns are handle, group, source page and target page.  The caller makes them before the
        step computes.  Sources are held until :meth:`advance` reports that the step has computed.
        """
        ...

    def checkpoint(self, handles: Ints, until: Ints) -> Ints:
        """Reserve pages for the states worth keeping while the holders compute up to ``until``.

        Best effort: call it last, when all of the step's pages are taken.

        :returns: rows [m, :class:`.CheckpointRow`].
        """
        ...

    def compact(self, most_large: int) -> Ints:
        """Move scattered pages of requests together into at most ``most_large`` large pages.

        Pages move only while there are spare large pages and others have holes.  Call it last, when
        all of the step's pages are taken.  :meth:`copies` returns the copies.

        :returns: the new pages [m, :class:`.NewPageRow`], with handles.
        """
        ...

    def append(self, handles: Ints, tokens: Ints) -> None:
        """Append one generated token per handle; a handle may occur several times."""
        ...

    def advance(self, handles: Ints, computed: Ints) -> None:
        """Set each holder's computed tokens, publish full pages, release those before windows."""
        ...

    def close(self, handle: int, *, renew: bool = True, returns: bool = False) -> None:
        """Release all pages of a holder. Its handle is invalid afterwards.

        :param renew: count this as an access now, and cache the state after the last computed token
            and the partly filled pages.
        :param returns: the request was preempted and will be opened again.
        """
        ...

    def delete(self, tokens: Tokens, root: str, *, model: str = "") -> int:
        """Evict the cached pages of this text alone and return their number.

        Pages that another text or a holder uses stay.
        """
        ...

    def empty_large_pages(self) -> int:
        """Return the number of large pages without used or cached pages, in constant time."""
        ...

    def evicted_pages(self) -> tuple[int, ...]:
        """Return the pages evicted so far, by group, in constant time."""
        ...

    def totals(self) -> PoolTotals:
        """Return the division of the pool and counters so far, in time linear in large pages."""
        ...

    def snapshot(self) -> PoolSnapshot:
        """Return the whole state as plain data, for the audit and for comparison."""
        ...


class HoldingCore(MemoryCore, Protocol):
    """A memory core that holds pages for transferred texts and reports what it caches."""

    def reserve(self, counts: Ints, lease_until: int, *, model: str = "") -> int:
        """Hold empty pages without a text and return a handle, or 0 if there are too few.

        :param counts: pages of each group, int32 [groups].
        :raises ValueError: if ``counts`` asks a group of another model for pages.
        """
        ...

    def adopt(
        self, handle: int, tokens: Tokens, root: str, *, prompt_tokens: int | None = None
    ) -> None:
        """Assign a reservation's pages, which contain the computed tokens of a text, to that text.

        The pages of each group become, in order, the positions that a request resuming after the
        text needs.  :meth:`MemoryCore.advance` to all tokens and :meth:`MemoryCore.close` put them
        into the index.

        :raises ValueError: if the handle is not a reservation, tokens are dropped, or a group has
            another number of pages than of positions.
        """
        ...

    def watch_index(self) -> None:
        """Record changes of the index from now on, for :meth:`index_changes`."""
        ...

    def index_changes(self) -> Ints:
        """Return the index's changes since the last call, in order [m, :class:`.IndexChangeRow`];
        no rows before :meth:`watch_index`.

        A holder's pages are named when they are computed, and for the last time when it is closed.
        """
        ...


class WithholdingCore(MemoryCore, Protocol):
    """A memory core that can withhold large pages from requests, for another owner."""

    def reclaim_order(self) -> LongInts:
        """Return the state of every large page [num_large_pages]: ``WITHHELD``, ``EMPTY``,
        ``CACHED`` and above (the smallest is reclaimed first), or ``USED``.  Takes time linear in
        the large pages."""
        ...

    def withhold(self, larges: Ints) -> None:
        """Take large pages out of the pool until they are restored, and evict their cached pages.

        :param larges: their numbers, int32 [n].
        :raises ValueError: if one is used or withheld, or the pool was cut into shares.
        """
        ...

    def restore(self, larges: Ints) -> None:
        """Return withheld large pages to the pool, empty, for any group.

        :param larges: their numbers, int32 [n].
        :raises ValueError: if one is not withheld.
        """
        ...


class VisibleCore(WithholdingCore, HoldingCore, Protocol):
    """A memory core that shows parts of its state cheaply, for observers."""

    def large_pages(self) -> LongInts:
        """Return a row for every large page [num_large_pages, :class:`.LargePageRow`].

        Takes time linear in the large pages and in the small pages of those without used ones.
        """
        ...

    def small_pages(self, large: int) -> LongInts:
        """Return the small pages of a large page [m, :class:`.SmallPageRow`]; none if no group.

        :raises ValueError: if there is no such large page.
        """
        ...

    def reach(
        self,
        tokens: Tokens,
        root: str,
        *,
        images: Images | None = None,
        prompt_tokens: int | None = None,
        model: str = "",
    ) -> LongInts:
        """Return the length at which a request could resume if one group alone decided [groups].

        The call changes nothing. Arguments are those of :meth:`MemoryCore.open`.  A group that no
        hit requires gets all indexed tokens; a group of another model gets ``NO_REACH``.
        """
        ...
