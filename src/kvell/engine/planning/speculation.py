"""Which running requests get draft tokens, and how many: speculation uses only what is left over.

Draft tokens are planned after all other work of a step.  They take the rest of the token budget,
and new pages only if every running request could still continue and nobody waits for memory:
nobody is preempted, put off or refused for a draft token.  The request's next tokens need those
pages anyway; if draft tokens are rejected, they need them a little later.

A state cannot be rolled back to before a rejected draft token.  So states advance over known
tokens only: a step computes draft tokens from them, and discards the states that result.  Accepted
draft tokens are computed once more in the next step, beside the newest token.

Sampling that is not plain (penalties, grammars, log probabilities) gets no draft tokens either.

No draft token lies beyond the short rotation table of its request, or the draft model's context.

A request that runs alone gets no draft tokens: it was promised memory for itself only.
Groups whose positions are not the text's take no pages for draft tokens when memory is short.
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
    """Plans the draft tokens of each step over one memory core."""

    def __init__(self, core: MemoryCore, limits: Limits) -> None:
        groups = [g for g in core.layout.groups if g.kind is not GroupKind.STATE]
        self.is_on = limits.num_speculative_tokens > 0
        self._core = core
        self._limits = limits
        self._is_text = all(g.kind in _TEXT_KINDS and not g.counts_images for g in groups)
        self._page_tokens = sorted({group.page_tokens for group in groups})

    def has_room(self, running: Sequence[Request]) -> bool:
        """Whether every request could take new pages for draft tokens, and still continue if all
        of them are rejected."""
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
        """Draft tokens to compute after the newest token, and the new pages they take.

        :param most: tokens that the step has left.
        :param new_pages: whether pages may be taken.
        """
        count = min(
            most,
            self._limits.num_speculative_tokens,
            request.max_tokens - len(request.output) - 1,
        )
        if request.may_outgrow_table:
            count = min(count, request.short_rope_tokens - request.num_tokens)
        if self._limits.draft_tokens_end:
            count = min(count, self._limits.draft_tokens_end - request.num_tokens)
        if count <= 0 or request.runs_alone or not request.sampling.is_plain:
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
        """Tokens that fit into the pages that hold ``num_tokens``."""
        if not self._is_text:
            return num_tokens
        ends = (-(-num_tokens // size) * size for size in self._page_tokens)
        return min(ends, default=num_tokens + self._limits.num_speculative_tokens)
