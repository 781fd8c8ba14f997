"""Sampling that is not plain: penalties, biases, grammars, token lists, and logprobs.

::

    work ──► begin ──► masks ───────────────────┐
             pass  ──► logits ──► logprobs of the prompt's tokens
                              └──► adjusted ──► drawn ──► logprob of the token
                                      ▲           │ it is the next draft token
                                      └───────────┘

A token after draft tokens is drawn as if they were output: its logits are adjusted by the
request's tokens and those draft tokens.  Tokens after a rejected draft token are not drawn, nor are
those whose mask is late.

A step with plain sampling does not use this module.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import isnan
from types import MappingProxyType

import numpy as np
import torch

from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.engine.requests.plan import NO_TOKEN, NOT_DRAWN, TokenWork
from kvell.engine.sampling.adjust import Ints, adjust
from kvell.engine.sampling.draw import GREEDY, RowSampling, sample
from kvell.engine.sampling.grammars import Allowed, Grammars, MaskedRequest
from kvell.engine.sampling.likelihood import all_token_logprobs, token_logprobs
from kvell.engine.sampling.permitted import permitted_tokens
from kvell.vocabulary import RequestId

Masks = Future[dict[RequestId, Allowed | None]]
DraftMasks = Mapping[RequestId, Sequence[Allowed | None]]
NO_MASKS: Mapping[RequestId, Allowed | None] = MappingProxyType({})


@dataclass
class SampledPart:
    """The results of a model's part of a step.

    :param tokens: a token for each row that draws, in order of the work; any token in rows after a
        rejected draft token; NOT_DRAWN where a mask is late.
    :param logprobs: logprobs of the drawn tokens up to the first that is not the draft token, by
        handle, for requests that asked for them.
    :param scored: logprobs of the prompt tokens after the computed ones, by handle; empty if
        logits are NaN or infinite.
    :param pooled: vectors of prompts by handle, as little-endian float32 bytes; empty if numbers
        are NaN or infinite.
    """

    tokens: list[int]
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    scored: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    pooled: dict[int, bytes] = field(default_factory=dict)


class Controls:
    """The sampling controls of one model's requests.

    :param grammars: None if the model has no tokenizer.
    :param end_token_ids: tokens that end an answer.
    """

    def __init__(self, grammars: Grammars | None = None, end_token_ids: Iterable[int] = ()) -> None:
        self.grammars = grammars
        self._ends = frozenset(end_token_ids)

    def begin(self, work: Sequence[TokenWork]) -> "StepControls | None":
        """Take the masks of a step's rows; return None if all of its sampling is plain.

        Masks that an engine did not wait for before it planned the step are computed meanwhile.
        """
        if all(item.past is None for item in work):
            return None
        wanted = [
            _masked(item, form)
            for item in work
            if item.samples and (form := item.spec.sampling.structured_outputs) is not None
        ]
        if not wanted or self.grammars is None:
            return StepControls(work, self._ends)
        masks = StepMasks(self.grammars.masks(wanted), partial(self.grammars.draft_masks, wanted))
        return StepControls(work, self._ends, masks)

    @torch.inference_mode()
    def adjust_draft(
        self, logits: torch.Tensor, work: TokenWork, draft_tokens: Sequence[int]
    ) -> None:
        """Change a draft model's row of logits as the model's will be, except by its grammar.

        :param draft_tokens: draft tokens before the row's token.
        """
        if work.past is not None:
            past = np.concatenate([work.past, np.asarray(draft_tokens, np.int32)])
            adjust(logits, work.spec.sampling, past, work.spec.prompt_tokens, self._ends)
            _bind(logits, work.spec.sampling, work, past, NO_MASKS)


class StepMasks:
    """The masks of a step's rows, by the request's id.

    :param first: masks of the tokens after the known ones.
    :param after_drafts: returns the masks after each draft token that are known in time.
    """

    def __init__(self, first: Masks, after_drafts: Callable[[], DraftMasks]) -> None:
        self._first, self._after_drafts = first, after_drafts

    @property
    def of_known(self) -> Mapping[RequestId, Allowed | None]:
        """The masks of the tokens after the known ones."""
        return self._first.result()

    @cached_property
    def drafted(self) -> DraftMasks:
        """The masks after draft tokens; the first use waits for them, a short time."""
        return self._after_drafts()


class StepControls:
    """The computation between logits and tokens of one step.

    :param masks: masks of requests with a grammar; None without such requests.
    """

    def __init__(
        self,
        work: Sequence[TokenWork],
        end_token_ids: frozenset[int],
        masks: StepMasks | None = None,
    ) -> None:
        self._work, self._ends, self._masks = work, end_token_ids, masks

    @torch.inference_mode()  # the mode in which modules computed the logits
    def draw(self, logits: torch.Tensor, rows: Sequence[RowSampling]) -> SampledPart:
        """Draw from the logits, float32 [n, vocabulary], and change them.

        :param rows: sampling of the rows that draw.
        """
        logits, scored = self._scores(logits)
        allowed = NO_MASKS if self._masks is None else self._masks.of_known
        first_rows = list(rows)
        draws: list[_Draw] = []
        row = 0
        for item in self._work:
            if item.samples and not item.spec.sampling.is_plain:
                draws.append(self._begin(logits[row], item, row, allowed))
                first_rows[row + 1 : row + item.num_draws] = [GREEDY] * item.proposed
            row += item.num_draws
        tokens = sample(logits, first_rows)
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        for draw in draws:
            reported = self._follow(draw, logits, rows, tokens)
            if reported:
                logprobs[draw.work.handle] = reported
        return SampledPart(tokens, logprobs, scored)

    def _begin(
        self,
        logits: torch.Tensor,
        work: TokenWork,
        row: int,
        allowed: Mapping[RequestId, Allowed | None],
        place: int = 0,
    ) -> "_Draw":
        """Change one row of logits for the token after ``place`` draft tokens.

        :param row: number of the row in the step.
        """
        params = work.spec.sampling
        past = _past(work, place)
        raw = None if params.logprobs is None else logits.clone()
        adjust(logits, params, past, work.spec.prompt_tokens, self._ends)
        return _Draw(work, row, raw, _bind(logits, params, work, past, allowed))

    def _follow(
        self,
        draw: "_Draw",
        logits: torch.Tensor,
        rows: Sequence[RowSampling],
        tokens: list[int],
    ) -> tuple[TokenLogprobs, ...]:
        """Draw the tokens after accepted draft tokens; return the logprobs to report.

        :param draw: the first draw of a work, whose token is drawn.
        :param tokens: the tokens of all rows, which are changed.
        """
        work = draw.work
        drafts = work.draft_tokens.tolist()
        reported = list[TokenLogprobs]()
        for place in range(work.num_draws):
            row = draw.row
            if place:
                [tokens[row]] = sample(logits[row : row + 1], rows[row : row + 1])
            if not draw.has_token:
                tokens[row] = NO_TOKEN
            if draw.raw is not None and tokens[row] >= 0:
                num_top = work.spec.sampling.logprobs or 0
                reported.append(token_logprobs(draw.raw, tokens[row], num_top))
            if place == work.proposed or tokens[row] != drafts[place]:
                break
            allowed = self._masks_after(work, place)
            if allowed is None:
                tokens[row + 1] = NOT_DRAWN
                break
            draw = self._begin(logits[row + 1], work, row + 1, allowed, place + 1)
        return tuple(reported)

    def _masks_after(
        self, work: TokenWork, place: int
    ) -> Mapping[RequestId, Allowed | None] | None:
        """Return the mask after a draft token of a work, like those of the first rows; None if it
        is late."""
        if self._masks is None or work.spec.sampling.structured_outputs is None:
            return NO_MASKS
        masks = self._masks.drafted.get(work.request_id, ())
        if place >= len(masks):
            return None
        return NO_MASKS if masks[place] is None else {work.request_id: masks[place]}

    def _scores(
        self, logits: torch.Tensor
    ) -> tuple[torch.Tensor, dict[int, tuple[TokenLogprobs, ...]]]:
        """Return the rows that draw, and the logprobs of prompt tokens after scored work."""
        if all(item.scores is None for item in self._work):
            return logits, {}
        scored: dict[int, tuple[TokenLogprobs, ...]] = {}
        kept: list[int] = []
        start = 0
        for item in self._work:
            end = start + item.num_logits
            if item.scores is not None:
                following = _past(item)[item.start + 1 : item.start + item.count + 1]
                following = following[: item.spec.prompt_tokens - item.start - 1]
                if len(following):
                    some = logits[start : start + len(following)]
                    logprobs = all_token_logprobs(some, following.tolist(), item.scores)
                    scored[item.handle] = (
                        () if any(isnan(each.logprob) for each in logprobs) else logprobs
                    )
            kept.extend(range(end - item.num_draws, end))
            start = end
        return logits[kept], scored


@dataclass(frozen=True)
class _Draw:
    """A row of adjusted logits.

    :param row: its number in the step.
    :param raw: the model's logits, if logprobs are reported.
    :param has_token: whether any token is left.
    """

    work: TokenWork
    row: int
    raw: torch.Tensor | None
    has_token: bool


def _past(work: TokenWork, num_drafts: int = 0) -> Ints:
    """Return the request's tokens, and the first draft tokens after them."""
    assert work.past is not None, "sampling that looks back is planned with its past"
    if not num_drafts:
        return work.past
    return np.concatenate([work.past, work.draft_tokens[:num_drafts]])


def _masked(work: TokenWork, form: StructuredOutputs) -> MaskedRequest:
    output = _past(work)[work.spec.prompt_tokens :]
    drafts = tuple(work.draft_tokens.tolist())
    return MaskedRequest(work.request_id, form, output, work.spec.tenant, drafts=drafts)


def _bind(
    logits: torch.Tensor,
    params: SamplingParams,
    work: TokenWork,
    past: Ints,
    masks: Mapping[RequestId, Allowed | None],
) -> bool:
    """Exclude tokens by a row's grammar and token lists; return whether any token is left.

    :param past: the request's tokens before the row's token.
    :param masks: masks of requests whose grammar is active; None if it allows no token.
    """
    allowed = masks.get(work.spec.request_id)
    is_masked = work.spec.request_id in masks
    if params.is_bounded and (allowed is not None or not is_masked):
        output = past[work.spec.prompt_tokens :]
        return _keep(logits, permitted_tokens(params, output, len(logits), allowed))
    return not is_masked or _keep(logits, allowed)


def _keep(logits: torch.Tensor, allowed: Allowed | None) -> bool:
    """Exclude all tokens that are not allowed; return whether any is left.

    ``min_tokens`` is ignored if it excludes every allowed token: the text is then complete.
    """
    if allowed is None or not allowed.any():
        return False
    there = torch.from_numpy(allowed).to(logits.device)
    logits[~there] = -torch.inf
    if torch.isneginf(logits).all():
        logits[there] = 0.0
    return True
