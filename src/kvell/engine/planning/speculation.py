"""Which running requests guess their next tokens, and how many: what nobody else wants.

Guesses are planned when all other work of a step is.  They take what is left of the token
budget, and new pages only where every running request could still go on and nobody waits
for memory: nobody is preempted, put off or refused for a guess.  The pages are those
that the request's next tokens need anyway, if fewer of them are right then a little later.

A state cannot go back to before a wrong guess.  So states go on over known tokens only: a
step computes guesses with them, and forgets what that made of them.  The tokens of right guesses
are computed once more, in the next step, beside the newest one.

A request that runs alone guesses nothing: it was promised memory for itself only.
Groups whose positions are not the text's take no pages for guesses when memory is short.
"""

from collections.abc import Sequence

import numpy as np

from kvell.engine.planning.proposals import Ints, propose
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import TO_DRAFT, NewPages
from kvell.engine.requests.request import Request
from kvell.memory import GroupKind, MemoryCore

_TEXT_KINDS = frozenset({GroupKind.FULL, GroupKind.SLIDING, GroupKind.CHUNKED})


class Speculation:
    """Guesses of one step after the other over one memory core."""

    def __init__(self, core: MemoryCore, limits: Limits) -> None:
        groups = [g for g in core.layout.groups if g.kind is not GroupKind.STATE]
        self.is_on = limits.num_speculative_tokens > 0
        self._core = core
        self._limits = limits
        self._is_text = all(g.kind in _TEXT_KINDS and not g.counts_images for g in groups)
        self._page_tokens = sorted({group.page_tokens for group in groups})

    def has_room(self, running: Sequence[Request]) -> bool:
        """Could every request guess in new pages, and still go on when all guesses are wrong?"""
        if any(request.runs_alone for request in running):
            return False
        most = self._limits.num_speculative_tokens + 1
        first, others = running[0], running[1:]
        return self._core.fits(
            first.handle,
            first.num_tokens + most,
            most,
            np.fromiter((r.handle for r in others), np.int32),
            np.fromiter((r.num_tokens + most for r in others), np.int32),
        )

    def draft_tokens(self, request: Request, most: int, new_pages: bool) -> tuple[Ints, NewPages]:
        """Tokens to compute behind the newest, and the pages that are new for them.

        :param most: tokens that the step has left.
        :param new_pages: may pages be taken?
        """
        count = min(
            most,
            self._limits.num_speculative_tokens,
            request.max_tokens - len(request.output) - 1,
        )
        if count <= 0 or request.runs_alone:
            return np.empty(0, np.int32), np.empty((0, 4), np.int32)
        tokens = self._tokens(request, count)
        known, until = request.num_tokens, request.num_tokens + len(tokens)
        if new_pages:
            until = self._core.largest(request.handle, until)
        else:
            until = min(until, self._held_until(known))
        _, rows = self._core.grow(
            np.asarray([request.handle], np.int32), np.asarray([until], np.int32)
        )
        return tokens[: until - known], rows

    def _tokens(self, request: Request, count: int) -> Ints:
        limits = self._limits
        if limits.has_drafter:
            return np.full(count, TO_DRAFT, np.int32)
        return propose(request.history(), count, limits.prompt_lookup_max, limits.prompt_lookup_min)

    def _held_until(self, num_tokens: int) -> int:
        """Tokens for which a request has pages when it has them for ``num_tokens``."""
        if not self._is_text:
            return num_tokens
        ends = (-(-num_tokens // size) * size for size in self._page_tokens)
        return min(ends, default=num_tokens + self._limits.num_speculative_tokens)
