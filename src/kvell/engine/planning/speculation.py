"""Draft tokens of running requests: speculation uses only what other work leaves.

Draft tokens are planned after all other work of a step.  They take the rest of the token budget,
and new pages only if every running request could still continue and no request waits for memory:
no request is preempted, deferred or refused for a draft token.  The request's next tokens need
those pages anyway, or a little later if draft tokens are rejected.

A state cannot be rolled back to before a rejected draft token.  So states advance over known
tokens only: a step computes draft tokens from them, and discards the resulting states.  The next
step computes accepted draft tokens once more, with the newest token.

Requests that run alone get no draft tokens: they have memory for themselves only.  Nor do requests
whose grammar's masks are slow (:mod:`kvell.engine.sampling.grammar_process.answer_masks`).  A draft
model proposes for the first of several models; requests of the others get none.

A token that a reasoning budget will force is a draft token too; a draft model draws it by itself,
under the request's sampling.

Draft tokens end at the short rotation table of their request and the draft model's context.

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
    """The planner of draft tokens over one memory core."""

    def __init__(self, core: MemoryCore, limits: Limits) -> None:
        groups = [g for g in core.layout.groups if g.kind is not GroupKind.STATE]
        self.is_on = limits.num_speculative_tokens > 0
        self._core = core
        self._limits = limits
        self._is_text = all(g.kind in _TEXT_KINDS and not g.counts_images for g in groups)
        self._page_tokens = sorted({group.page_tokens for group in groups})
        self._drafted_models = {group.model for group in core.layout.groups if group.is_draft}

    def has_room(self, running: Sequence[Request]) -> bool:
        """Return whether all requests could take new pages for draft tokens, and still continue if
        all of these are rejected."""
        if any(request.runs_alone for request in running):
            return False
        count = self._limits.num_speculative_tokens + 1
        first, others = running[0], running[1:]
        return self._core.fits(
            first.handle,
            first.num_tokens + count,
            count,
            np.fromiter((r.handle for r in others), np.int32),
            np.fromiter((r.num_tokens + count for r in others), np.int32),
        )

    def draft_tokens(self, request: Request, budget: int, new_pages: bool) -> tuple[Ints, NewPages]:
        """Return the draft tokens to compute after the newest token, and the new pages they take.

        :param budget: tokens that the step has left.
        :param new_pages: whether pages may be taken.
        """
        count = min(
            budget,
            self._limits.num_speculative_tokens,
            request.max_tokens - len(request.output) - 1,
        )
        if request.may_outgrow_table:
            count = min(count, request.short_rope_tokens - request.num_tokens)
        if self._limits.draft_tokens_end:
            count = min(count, self._limits.draft_tokens_end - request.num_tokens)
        can_draft = not (request.runs_alone or request.drawing)
        if count <= 0 or not can_draft or not self._is_drafted(request):
            return np.empty(0, np.int32), np.empty((0, 4), np.int32)
        tokens = self._tokens(request, count)
        start = request.num_tokens
        until = request.num_tokens + len(tokens)
        if new_pages:
            until = self._core.largest(request.handle, until)
        else:
            until = min(until, self._held_until(start))
        _, rows = self._core.grow(
            np.asarray([request.handle], np.int32), np.asarray([until], np.int32)
        )
        return tokens[: until - start], rows

    def _is_drafted(self, request: Request) -> bool:
        """Return whether draft tokens are looked up, or the draft model is of the request's."""
        return not self._drafted_models or request.model in self._drafted_models

    def _tokens(self, request: Request, count: int) -> Ints:
        limits = self._limits
        if limits.has_drafter:
            return np.full(count, TO_DRAFT, np.int32)
        longest = limits.prompt_lookup_max
        tokens = propose(request.history(), count, longest, limits.prompt_lookup_min)
        budget = request.sampling.reasoning_budget
        if budget is None or budget.end in request.output:
            return tokens
        place = budget.end_place(request.output[0]) - len(request.output)
        if not 0 <= place < min(len(tokens) + 1, count):
            return tokens
        return np.append(tokens[:place], np.int32(budget.end))

    def _held_until(self, num_tokens: int) -> int:
        """Return the number of tokens that fit into the pages that hold ``num_tokens``."""
        if not self._is_text:
            return num_tokens
        ends = (-(-num_tokens // size) * size for size in self._page_tokens)
        return min(ends, default=num_tokens + self._limits.num_speculative_tokens)
