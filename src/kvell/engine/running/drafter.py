"""Speculation with a draft model, which proposes draft tokens before the step verifies them.

::

    plan ──► pass 0: known tokens ──► first draft tokens
             pass 1: first draft tokens ──► second draft tokens
             …
             pass n: the last draft tokens, for their keys and values only
    plan with draft tokens ──► the model computes and verifies all in one pass

The drafter computes all that the model computes, chunk by chunk, into pages of its groups, which
the same requests hold.  So tokens are computed, published, hit and preempted for both models
together.  The drafter has no other state per request.

If either model has states, these do not advance over draft tokens
(:mod:`kvell.engine.planning.chunks`): each pass starts again after the known tokens, and the
last pass is not needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from msgspec import structs

from kvell.engine.planning.proposals import Ints
from kvell.engine.requests.plan import StepPlan, TokenWork
from kvell.engine.running.forward_batches import ForwardBatches
from kvell.engine.running.lent.queries import Queries
from kvell.engine.sampling.controls import Controls
from kvell.engine.sampling.draw import largest
from kvell.memory import GroupKind, Layout
from kvell.models.paged_model import ForwardBatch, PagedModel


class Drafter:
    """A draft model over the pool of the model that it drafts for.

    :param name: name of the model that it drafts for; "" if that is the only one.
    :param controls: sampling controls of the requests; draft tokens are drawn under them too.
    """

    def __init__(
        self,
        model: PagedModel,
        layout: Layout,
        name: str,
        batches: ForwardBatches,
        controls: Controls,
    ) -> None:
        self._model, self._name, self._controls = model, name, controls
        self._batches = batches
        self._queries: Queries | None = None
        kinds = {group.kind for group in layout.groups if group.model == name}
        self._again = GroupKind.STATE in kinds

    def with_draft_tokens(self, plan: StepPlan, queries: Queries | None = None) -> StepPlan:
        """Replace ``TO_DRAFT`` by draft tokens, whose KV is in the drafter's pages.

        :param queries: queries for remote sections; the drafter is the last model.
        """
        self._queries = queries
        works = [work for work in plan.work if work.spec.model == self._name]
        if not works:
            return plan
        drafting = [_Drafting(work) for work in works if work.proposed]
        known_work = [
            structs.replace(w, count=w.known, token_ids=w.token_ids[: w.known], proposed=0)
            for w in works
        ]
        wants = [1 if work.proposed else 0 for work in works]
        batch = self._batches.batch(known_work, plan.checkpoints, wants)
        self._run(known_work, batch, drafting)
        most_proposed = max((request.work.proposed for request in drafting), default=0)
        for count in range(1, most_proposed + (0 if self._again else 1)):
            self._pass([request for request in drafting if request.work.proposed >= count], count)
        filled = {request.work.handle: request.filled() for request in drafting}
        return replace(plan, work=tuple(filled.get(work.handle, work) for work in plan.work))

    def _pass(self, drafting: Sequence["_Drafting"], count: int) -> None:
        """Compute draft token number ``count`` of each request; draft the next if it needs one."""
        if self._again:
            drafting = [request for request in drafting if request.work.proposed > count]
        work = [request.step(count, again=self._again) for request in drafting]
        wants = [1 if request.work.proposed > count else 0 for request in drafting]
        wanting = [request for request, want in zip(drafting, wants, strict=True) if want]
        self._run(work, self._batches.batch(work, num_logits=wants), wanting)

    def _run(
        self, work: Sequence[TokenWork], batch: ForwardBatch, wanting: Sequence["_Drafting"]
    ) -> None:
        if self._queries is not None:
            self._queries.expect(-1, work)
        controls = self._controls.begin([request.filled() for request in wanting])
        logits = self._model.forward(batch)
        if self._queries is not None:
            self._queries.note(-1, work)
        if controls is not None:
            controls.adjust(logits)
        for request, token in zip(wanting, largest(logits), strict=True):
            # If logits are NaN, any token will do: all are verified.
            request.draft_tokens.append(max(0, token))


@dataclass
class _Drafting:
    """One request's work, and its draft tokens so far."""

    work: TokenWork
    draft_tokens: list[int] = field(default_factory=list)

    def step(self, count: int, *, again: bool) -> TokenWork:
        """Return the work of draft token number ``count``; with ``again``, of all up to it.

        States discard draft tokens, so with ``again`` all draft tokens count as proposed.
        """
        first = 0 if again else count - 1
        return structs.replace(
            self.work,
            start=self.work.start + self.work.known + first,
            count=count - first,
            token_ids=np.asarray(self.draft_tokens[first:count], np.int32),
            proposed=count - first if again else 0,
        )

    def filled(self) -> TokenWork:
        known_ids: Ints = self.work.token_ids[: self.work.known]
        draft_tokens = np.asarray(self.draft_tokens, np.int32)
        return structs.replace(
            self.work,
            count=len(known_ids) + len(draft_tokens),
            token_ids=np.concatenate([known_ids, draft_tokens]),
            proposed=len(draft_tokens),
        )
