"""The memory core's interface: pool, tables and prefix index behind batch calls.

Two classes implement it, ``ReferenceCore`` in Python and ``CompiledCore`` in C++; both make
the same decisions.  Time is the step number.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvell.pages.layout import GroupSpec, Layout
from kvell.pages.snapshot import PoolSnapshot, PoolTotals
from kvell.prefix.groups.facts import Images
from kvell.prefix.index.radix import Tokens

Ints = npt.NDArray[np.int32]
"""An array of int32; docstrings say its shape."""
LongInts = npt.NDArray[np.int64]
"""An array of int64; docstrings say its shape."""

NEW_PAGE_COLUMNS = 4
"""Columns of a new-pages array: index into the call's handles, group, position, page."""
COPY_COLUMNS = 4
"""Columns of a copies array: handle, group, source page, target page."""
SOURCE_COLUMNS = 4
"""Columns of a sources array: group, position, page, tokens of the prefix that it stands for."""
CHECKPOINT_COLUMNS = 5
"""Columns of a checkpoints array: index into the call's handles, group, tokens that the state
stands for, slice of the state, page."""

WITHHELD, EMPTY, CACHED, USED = 0, 1, 2, np.iinfo(np.int64).max
"""States of a large page, in the order in which it can be reclaimed: withheld from the core; empty;
with cached pages but no used one (this value or more, by age); in use."""
RANK_SHIFT = 40
"""A cached large page is numbered ``CACHED + (rank << RANK_SHIFT) + time``, by its youngest page.
"""

LARGE_PAGE_COLUMNS = 4
"""Columns of a large-pages array: group, small pages used, small pages cached, step.  The group is
``NO_GROUP`` where all of it is empty, ``WITHHELD_GROUP`` where it is withheld.  The step is when
the page that goes last was accessed, where none is used and some are cached; else ``NO_STEP``."""
SMALL_PAGE_COLUMNS = 4
"""Columns of a small-pages array: page, users, tokens of the prefix that it ends (``NO_END`` if the
index does not name it), step when it was last accessed (``NO_STEP`` likewise)."""
WITHHELD_GROUP, NO_STEP, NO_END, NO_REACH = -2, -1, -1, -1


class MemoryCore(Protocol):
    """One call per step for a whole batch; the scheduler and the simulator drive it.

    Handles name holders (requests and leases) and are never reused.  What comes for a batch
    (``handles``, ``until``, ``computed``) is int32 [n], an item for each holder; ``until`` and
    ``computed`` count tokens from the first one of the text.  Every call leaves the core
    consistent; a call that raises has changed nothing.
    """

    @property
    def layout(self) -> Layout:
        """The groups and the pool that the core serves."""
        ...

    def begin_step(self, step: int) -> None:
        """Set the time (step numbers only grow) and close the leases that have expired."""
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
        """Return the length in tokens at which such a request would resume; changes nothing.

        Arguments are those of :meth:`open`.
        """
        ...

    def known(self, tokens: Tokens, root: str, *, model: str = "") -> Ints:
        """Return every page that the index names along a text [m, ``SOURCE_COLUMNS``], sorted.

        Pages of tokens, half full where the last column is no multiple of a page, and states, whose
        position is the slice; not those of images.  Changes nothing; with holes, unlike a hit.
        Linear in the text.

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

        At least the last token is left to compute.  Without ``reuse`` every token is, and all
        cached pages without a user are evicted first, so that the holder's pages lie as densely as
        the contract assumes. Without a lease the caller must not change the tokens until the holder
        is claimed or given pages: they are copied only then. With ``lease_until`` the pages are
        given back automatically after that step unless claimed.

        :param tokens: the request's tokens as far as they are known, at least one.
        :param root: requests share prefixes only within one root (adapter, salt).
        :param lease_until: the last step of a lease; None for a request.
        :param reuse: whether cached pages may be taken.
        :param images: int32 [n, 3]: first token in the text, tokens there, image tokens. The ids of
            an image's tokens in the text identify its content.
        :param prompt_tokens: where the prompt ends, if some of the tokens were generated.
        :param model: the model whose groups the request uses.
        :raises ValueError: if no group belongs to that model, or images overlap.
        """
        ...

    def claim(self, handle: int, expected_tokens: int, *, will_return: bool | None = None) -> None:
        """Turn a lease into a request that is expected to reach ``expected_tokens`` in all.

        :param expected_tokens: tokens of prompt and answer together.
        :param will_return: whether the client says that its conversation goes on; None if it says
            nothing.
        """
        ...

    def hit_tokens(self, handle: int) -> int:
        """Return how many tokens the handle's prefix hit covers."""
        ...

    def receive(self, handle: int, computed: int) -> None:
        """Resume after the first ``computed`` tokens, whose contents come from elsewhere.

        The holder was just opened; it needs pages only for what a later step reads.  The pages of
        its prefix hit that are still read stay, and it also takes whole pages, and pages of images,
        that the index knows behind its hit, in each group up to the first that is missing.  Pages
        of tokens behind that, and the states and half-full pages that end there, a request keeps
        (:meth:`sources`) and :meth:`copies` copies them; a lease leaves them.  :meth:`grow` gives
        all other pages; the caller fills those that are not copied before the step that continues.
        Nothing that came is published before that step's :meth:`advance`, whatever happens.

        A lease may know all of its tokens computed: advanced to them and closed, it has put what
        came into the index without a step.

        :raises ValueError: if the holder was given pages, drops tokens, or has images among the
            tokens of its pages; if ``computed`` cuts an image, is less than its hit, or more than
            the tokens it knows, the last of which a request has still to compute.
        """
        ...

    def send_away(self, handle: int, away_tokens: int) -> None:
        """Let a request's first ``away_tokens`` tokens lie elsewhere in full attention groups.

        More than before: their pages here lose their user and go first; others may hit them.
        Fewer: the next :meth:`grow` gives empty pages for those that come home too, and
        the next :meth:`advance` names them in holes.  Source: Infinite-LLM §4.2.

        :raises ValueError: if the tokens are negative, more than computed or end inside a page; if
            the holder is a lease or reservation or has :meth:`sources`, unless pages
            that were moved are all of them and no token comes home; if its model has no full
            attention, drops tokens or counts images in pages of the text.
        """
        ...

    def sources(self, handle: int) -> Ints:
        """Return cached pages that a holder keeps for copies that are still to be made
        [m, ``SOURCE_COLUMNS``]: what its prefix fills in part, states, and pages behind a hole.

        Pages from which :meth:`compact` moved are among them, with 0 tokens.
        """
        ...

    def grow(self, handles: Ints, until: Ints) -> tuple[int, Ints]:
        """Give the holders pages for tokens 0 … until-1, jointly over groups.

        Serves the longest feasible run of ``handles`` from the front.

        :returns: the number of handles served, and the new pages [m, 4]: (index into handles,
            group, position, page).
        """
        ...

    def largest(self, handle: int, until: int) -> int:
        """Return the largest length ≤ ``until`` that :meth:`grow` could give the holder now."""
        ...

    def held_pages(self, handle: int) -> Ints:
        """Return all pages of a holder [m, 4], in the columns of :meth:`grow` (first column 0)."""
        ...

    def fits(
        self, handle: int, until: int, chunk_tokens: int, others: Ints, others_until: Ints
    ) -> bool:
        """Return whether the holder could reach ``until`` tokens in chunks of ``chunk_tokens``
        while each of ``others`` still gets what it needs for ``others_until``.

        :param others: handles of running requests, int32 [n].
        :param others_until: tokens that each of them will have next, int32 [n].
        """
        ...

    def may_fit(self) -> bool:
        """Return whether asking again about the request turned away last can succeed.

        That request was opened without a lease or images, :meth:`fits` said that it does not fit,
        and it was closed.  False only if the same question, about the same others or more, grown
        since, would certainly have the same answer.  Usually one request waits and is turned away
        at every step.
        """
        ...

    def copies(self) -> Ints:
        """Return the copies with which pages given since the last call begin.

        They are rows [m, 4]: (handle, group, source page, target page).

        The caller makes them before the step computes.  Sources are held until :meth:`advance` says
        that the step has computed.
        """
        ...

    def checkpoint(self, handles: Ints, until: Ints) -> Ints:
        """Reserve pages for the states worth keeping while the holders compute up to ``until``.

        Best effort: call it last, when all of the step's pages are taken.

        :returns: rows [m, 5]: (index into handles, group, tokens that the state stands for, slice,
            page).
        """
        ...

    def compact(self, most_large: int) -> Ints:
        """Move scattered pages of requests into at most ``most_large`` large pages of their own.

        Pages move only while there are spare large pages and others have holes.  Call it last, when
        all of the step's pages are taken.  :meth:`copies` returns the copies.

        :returns: rows [m, 4]: (handle, group, position, new page).
        """
        ...

    def append(self, handles: Ints, tokens: Ints) -> None:
        """Append one generated token for each handle; a handle may come several times.

        :param tokens: int32 [n], one for each handle.
        """
        ...

    def advance(self, handles: Ints, computed: Ints) -> None:
        """Set the tokens each holder has computed: publish full pages, leave windows behind."""
        ...

    def close(self, handle: int, *, renew: bool = True, returns: bool = False) -> None:
        """Give everything back; the handle names nothing from then on.

        :param renew: count this as an access now, and keep what ends here: the state after the last
            computed token, and pages left half full.
        :param returns: the request has not ended but was preempted; it comes again.
        """
        ...

    def delete(self, tokens: Tokens, root: str, *, model: str = "") -> int:
        """Evict what is cached of this text alone; returns the number of pages.

        Pages that another text or a holder has too stay.
        """
        ...

    def empty_large_pages(self) -> int:
        """Return how many large pages nobody uses and cache nothing; constant time."""
        ...

    def evicted_pages(self) -> tuple[int, ...]:
        """Return the pages evicted so far, by group; constant time too."""
        ...

    def totals(self) -> PoolTotals:
        """Return how the pool is divided now, and counters so far; linear in large pages only."""
        ...

    def snapshot(self) -> PoolSnapshot:
        """Return the whole state as plain data, for the audit and for comparison."""
        ...


class HoldingCore(MemoryCore, Protocol):
    """A memory core that holds pages for texts that come and go, and tells what it caches."""

    def reserve(self, counts: Ints, lease_until: int, *, model: str = "") -> int:
        """Hold empty pages that belong to no text; returns a handle, or 0 if there are too few.

        :param counts: int32 [groups], pages of each group.
        :raises ValueError: if a group of another model is asked for pages.
        """
        ...

    def adopt(
        self, handle: int, tokens: Tokens, root: str, *, prompt_tokens: int | None = None
    ) -> None:
        """Make a reservation's pages those of a text whose tokens are all computed and in them.

        The pages of each group become, in order, the positions that a request resuming behind the
        text needs.  :meth:`MemoryCore.advance` to all tokens and :meth:`MemoryCore.close` put them
        into the index.

        :raises ValueError: if the handle is no reservation, tokens are dropped, or the pages of a
            group are not as many as that.
        """
        ...

    def watch_index(self) -> None:
        """Remember from now on what the index names and drops, for :meth:`index_changes`."""
        ...

    def index_changes(self) -> Ints:
        """Return what the index named, dropped and renumbered since the last call, in order
        [m, ``CHANGE_COLUMNS``] (``index/changes.py``); nothing unless it is watched.

        A holder's pages are named when they are computed, and for the last time when it is closed.
        """
        ...


class WithholdingCore(MemoryCore, Protocol):
    """A memory core that can withhold large pages from requests, for another owner."""

    def reclaim_order(self) -> LongInts:
        """Return for every large page how soon it can be taken away [num_large_pages]:
        ``WITHHELD``, ``EMPTY``, ``CACHED`` and above (the smallest first), or ``USED``.  Linear in
        the large pages."""
        ...

    def withhold(self, larges: Ints) -> None:
        """Take large pages out of the pool until they are restored; what they cache is evicted.

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
    """A memory core that shows parts of its state cheaply, for people who watch it."""

    def large_pages(self) -> LongInts:
        """Return a row for every large page [num_large_pages, ``LARGE_PAGE_COLUMNS``].  Linear in
        the large pages, and in the small pages of those that are only cached."""
        ...

    def small_pages(self, large: int) -> LongInts:
        """Return the small pages of a large page [m, ``SMALL_PAGE_COLUMNS``]; none if it belongs to
        no group.

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
        """Return for each group at which length a request could resume if that group alone decided
        [groups]; changes nothing.

        Arguments are those of :meth:`MemoryCore.open`.  A group that no hit requires has all tokens
        that the index knows; a group of another model has ``NO_REACH``.
        """
        ...
