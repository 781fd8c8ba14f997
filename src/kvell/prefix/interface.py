"""The memory core's interface: pool, tables and prefix index behind batch calls.

Two classes satisfy it, ``ReferenceCore`` in Python and ``CompiledCore`` in C++, and
decide alike.  Time is the step number.
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
LongInts = npt.NDArray[np.int64]

NEW_PAGE_COLUMNS = 4
"""Columns of a new-pages array: index into the call's handles, group, position, page."""
COPY_COLUMNS = 4
"""Columns of a copies array: handle, group, source page, target page."""
CHECKPOINT_COLUMNS = 5
"""Columns of a checkpoints array: index into the call's handles, group, tokens that the state
stands for, slice of the state, page."""

WITHHELD, EMPTY, CACHED, USED = 0, 1, 2, np.iinfo(np.int64).max
"""Of a large page, in the order in which it may be had: not the core's now; empty; with cached
pages but no used one (or more, by age); in use."""
RANK_SHIFT = 40
"""A cached large page's number is ``CACHED + (rank << RANK_SHIFT) + time`` of its youngest page."""


class MemoryCore(Protocol):
    """One call per step for a whole batch; what the scheduler and the simulator drive.

    Handles name holders (requests and leases) and are never reused.  Every call
    leaves the core consistent; a call that raises has changed nothing.
    """

    @property
    def layout(self) -> Layout:
        """Groups and pool that the core serves."""
        ...

    def begin_step(self, step: int) -> None:
        """Set the time (steps only grow) and let leases that are over expire."""
        ...

    def register(self, groups: Sequence[GroupSpec]) -> None:
        """Serve a further model's groups from the same pool; its large page keeps its size.

        :raises ValueError: if a group's pages do not divide the large page, its model is
            there already, or the pool was cut into shares at start.
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
        """Length of the prefix a request with these tokens would resume at; changes nothing."""
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
        """Match and hold the longest resumable prefix; returns a handle.

        At least the last token is left to compute.  Without ``reuse`` all of them
        are, and whatever is cached without a user is evicted first: the pages of
        the holder then lie as densely as the contract counts on.
        Without a lease the tokens must stay as they are until the holder is claimed or given
        pages: only then are they copied.
        With ``lease_until`` the pages are given back by themselves after that step
        unless claimed.

        :param root: prefixes are shared within one (adapter, salt).
        :param images: int32 [n, 3]: first token in the text, tokens there, image tokens.
            The ids of an image's tokens in the text tell its content.
        :param prompt_tokens: where the prompt ends, if some of the tokens were generated.
        :param model: whose groups the request uses.
        :raises ValueError: if no group is of that model, or images overlap.
        """
        ...

    def claim(self, handle: int, expected_tokens: int, *, will_return: bool | None = None) -> None:
        """Turn a lease into a request that is expected to reach so many tokens in all.

        :param will_return: the client's word on whether its conversation goes on; None: nothing
            said.
        """
        ...

    def hit_tokens(self, handle: int) -> int:
        """Tokens that the handle's prefix hit covers."""
        ...

    def receive(self, handle: int, computed: int) -> None:
        """What is computed of the first ``computed`` tokens comes from elsewhere: a holder just
        opened goes on behind it, and needs pages only for what a later step reads.

        Pages of its prefix hit stay, as far as they are read; :meth:`grow` gives the others, and
        the caller fills them, and the states, before the step that computes on.  Until that
        step's :meth:`advance`, nothing of what came is published, whatever happens.

        :raises ValueError: if it is a lease, was given pages, has images or drops tokens; if so
            many tokens are less than its hit, or not fewer than it knows.
        """
        ...

    def grow(self, handles: Ints, until: Ints) -> tuple[int, Ints]:
        """Give the holders pages for tokens 0 … until-1, jointly over groups.

        Serves the longest feasible run of ``handles`` from the front; returns its
        length and the new pages [m, 4]: (index into handles, group, position, page).
        """
        ...

    def largest(self, handle: int, until: int) -> int:
        """Largest length ≤ ``until`` that :meth:`grow` could give the holder now."""
        ...

    def held_pages(self, handle: int) -> Ints:
        """All pages of a holder [m, 4], in the columns of :meth:`grow` (first column 0)."""
        ...

    def fits(
        self, handle: int, until: int, chunk_tokens: int, others: Ints, others_until: Ints
    ) -> bool:
        """Could the holder be brought to ``until`` tokens in chunks of ``chunk_tokens``,
        while each of ``others`` still gets what it needs for ``others_until``?"""
        ...

    def may_fit(self) -> bool:
        """Is it worth asking again for the request that was turned away last: opened without a
        lease or images, told by :meth:`fits` that it does not fit, and closed?

        False only if the same question, about the same others or more, grown on since, would
        certainly have the same answer: most often one waits that is turned away at every step.
        """
        ...

    def copies(self) -> Ints:
        """Page copies that pages given since the last call begin with [m, 4]: (handle, group,
        source, target).

        To be made before the step computes.  Sources are held until :meth:`advance` says
        that it did.
        """
        ...

    def checkpoint(self, handles: Ints, until: Ints) -> Ints:
        """Pages for the states worth keeping while the holders compute up to ``until``.

        Returns [m, 5]: (index into handles, group, tokens the state stands for, slice,
        page).  Best effort: asked last, when all of the step's pages are taken.
        """
        ...

    def compact(self, most_large: int) -> Ints:
        """Move scattered pages of requests into at most so many large pages of their own.

        Returns [m, 4]: (handle, group, position, page that it is in now); :meth:`copies`
        has them too.  Only while large pages are to spare and others have holes; asked
        last, when all of the step's pages are taken.
        """
        ...

    def append(self, handles: Ints, tokens: Ints) -> None:
        """One generated token for each handle (a handle may come several times)."""
        ...

    def advance(self, handles: Ints, computed: Ints) -> None:
        """The holders have this many tokens computed: publish full pages, leave windows behind."""
        ...

    def close(self, handle: int, *, renew: bool = True, returns: bool = False) -> None:
        """Give everything back; ``renew`` counts it as an access now, and keeps what ends here:
        the state after the last computed token, and pages that it left half full.

        :param returns: nothing has ended: the same request comes again (it was preempted).
        """
        ...

    def empty_large_pages(self) -> int:
        """Large pages that nobody uses and that cache nothing; in every step, so of constant
        work."""
        ...

    def evicted_pages(self) -> tuple[int, ...]:
        """Pages evicted so far, by group; as cheap."""
        ...

    def totals(self) -> PoolTotals:
        """How the pool is divided now, and counters so far; work grows with large pages only."""
        ...

    def snapshot(self) -> PoolSnapshot:
        """The whole state as plain data, for the audit and for comparison."""
        ...


class LendingCore(MemoryCore, Protocol):
    """A memory core whose large pages may be somebody else's for a while."""

    def reclaim_order(self) -> LongInts:
        """Every large page by how soon it may be taken away [num_large_pages]: ``WITHHELD``,
        ``EMPTY``, ``CACHED`` and above (the smallest goes first), ``USED``.  Work grows
        with large pages."""
        ...

    def withhold(self, larges: Ints) -> None:
        """Take large pages out of the pool until they are restored; what they cache is evicted.

        :raises ValueError: if one is used or withheld, or the pool was cut into shares.
        """
        ...

    def restore(self, larges: Ints) -> None:
        """Withheld large pages are empty again, for any group.

        :raises ValueError: if one is not withheld.
        """
        ...
