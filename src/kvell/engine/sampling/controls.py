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
from functools import cache, cached_property, partial
from math import isnan
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.engine.protocol.sampling_params import ALL_TOKENS, SamplingParams
from kvell.engine.protocol.structured_outputs import ReasoningBudget, StructuredOutputs
from kvell.engine.requests.plan import NO_TOKEN, NOT_DRAWN, TokenWork
from kvell.engine.sampling.draw import GREEDY, RowSampling, sample
from kvell.engine.sampling.grammars import Allowed, Grammars, MaskedRequest
from kvell.vocabulary import RequestId


def forced_token(budget: ReasoningBudget, output: npt.NDArray[np.int32]) -> int | None:
    """Return the token that is forced next, or None.

    ::

        answer   <think>  a  b  c  d  </think>  …
                          └─ budget ┘ └─ forced, unless one of a … d was the end

    The budget of a request that was preempted or moved ends at the same token.

    :param output: the answer's tokens so far, int32.
    """
    if len(output) != budget.end_place(int(output[0]) if len(output) else -1):
        return None
    has_ended = np.isin(output, (budget.end, *budget.calls)).any()
    return None if has_ended else budget.end


Ints = npt.NDArray[np.int32]


def adjust(
    logits: torch.Tensor,
    params: SamplingParams,
    past: Ints,
    prompt_tokens: int,
    end_token_ids: Iterable[int] = (),
) -> None:
    """Change one row of logits in place: penalties, then biases, then ``min_tokens``.

    When a reasoning budget is used up, only the token that ends the reasoning remains.

    :param logits: float32 [vocabulary].
    :param past: the request's tokens so far; negative ids (images) are ignored.
    :param prompt_tokens: number of prompt tokens in ``past``.
    """
    output = past[prompt_tokens:]
    window = params.repeat_last_n
    first = 0 if window == ALL_TOKENS else max(0, len(past) - window)
    if params.repetition_penalty != 1.0:
        tokens = np.unique(past[first:])
        there = _on(logits, tokens[tokens >= 0])
        scores = logits[there]
        penalty = params.repetition_penalty
        # As CTRL (Keskar et al., 2019) and transformers penalise tokens.
        logits[there] = torch.where(scores < 0, scores * penalty, scores / penalty)
    penalized = past[max(first, prompt_tokens) :]
    if (params.presence_penalty or params.frequency_penalty) and len(penalized):
        tokens, counts = np.unique(penalized, return_counts=True)
        penalties = params.presence_penalty + params.frequency_penalty * counts
        logits[_on(logits, tokens)] -= _on(logits, penalties.astype(np.float32))
    if params.logit_bias:
        tokens = np.fromiter(params.logit_bias, np.int64)
        biases = np.fromiter(params.logit_bias.values(), np.float32)
        logits[_on(logits, tokens)] += _on(logits, biases)
    if len(output) < params.min_tokens:
        ends = {*params.stop_token_ids, *end_token_ids}.intersection(range(len(logits)))
        logits[_on(logits, np.array(sorted(ends), np.int64))] = -torch.inf
    if params.reasoning_budget is not None:
        token = forced_token(params.reasoning_budget, output)
        if token is not None and token < len(logits):
            logits.fill_(-torch.inf)
            logits[token] = 0.0


def _on(logits: torch.Tensor, values: npt.NDArray[np.generic]) -> torch.Tensor:
    wide = values.astype(np.int64) if values.dtype.kind == "i" else values
    return torch.from_numpy(wide).to(logits.device)


def permitted_tokens(
    params: SamplingParams, output: Ints, vocab_size: int, allowed: Allowed | None = None
) -> Allowed:
    """Return the tokens that are permitted next, bool [vocabulary].

    :param output: the request's tokens after its prompt.
    :param allowed: the tokens that a grammar allows; None for all.
    """
    permitted = np.ones(vocab_size, bool) if allowed is None else allowed.copy()
    if params.allowed_token_ids is not None:
        listed = np.zeros(vocab_size, bool)
        listed[np.array(params.allowed_token_ids, np.int64)] = True
        permitted &= listed
    for *before, last in params.bad_words_token_ids:
        # The first tokens of a word are permitted: another word may begin with them.
        if not before or output[-len(before) :].tolist() == before:
            permitted[last] = False
    return permitted


def token_logprobs(logits: torch.Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Return the logprobs of a token under one row of logits.

    :param logits: float32 [vocabulary], unchanged from the model.
    :param num_top: number of the likeliest tokens to report.
    """
    [logprobs] = all_token_logprobs(logits[None], [token], num_top)
    return logprobs


def all_token_logprobs(
    logits: torch.Tensor, tokens: list[int], num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Return the logprobs of one token under each row of logits, float32 [n, vocabulary]."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    values, ids = logprobs.topk(num_top, -1) if num_top else (logprobs[:, :0], logprobs[:, :0])
    return tuple(
        TokenLogprobs(logprob, rank, tuple(zip(map(int, top_ids), top, strict=True)))
        for logprob, rank, top_ids, top in zip(
            chosen[:, 0].tolist(), ranks.tolist(), ids.tolist(), values.tolist(), strict=True
        )
    )


Masks = Future[dict[RequestId, Allowed | None]]
DraftMasks = Mapping[RequestId, Sequence[Allowed | None]]
RowMasks = Mapping[RequestId, Allowed | None]
"""The mask of a row by the request's id: None allows no token; without an entry any is allowed."""
NO_MASKS: RowMasks = MappingProxyType({})


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
        masks = StepMasks()
        if wanted and self.grammars is not None:
            after_drafts = partial(self.grammars.draft_masks, wanted)
            masks = StepMasks(self.grammars.masks(wanted), after_drafts)
        return StepControls(work, self._ends, masks)


class StepMasks:
    """The masks of a step's rows, by the request's id.

    :param first: masks of the tokens after the known ones; None without requests with a grammar.
    :param after_drafts: returns the masks after each draft token that are known in time.
    """

    def __init__(
        self, first: Masks | None = None, after_drafts: Callable[[], DraftMasks] = dict
    ) -> None:
        self._first = first
        self._drafted = cache(after_drafts)

    @cached_property
    def _known(self) -> RowMasks:
        return NO_MASKS if self._first is None else self._first.result()

    def after(self, work: TokenWork, num_drafts: int) -> RowMasks | None:
        """Return the mask of the token after some draft tokens of a work; None if it is late.

        The first use of masks after draft tokens waits for them, a short time.
        """
        if self._first is None or work.spec.sampling.structured_outputs is None:
            return NO_MASKS
        if not num_drafts:
            is_masked = work.request_id in self._known
            return {work.request_id: self._known[work.request_id]} if is_masked else NO_MASKS
        masks = self._drafted().get(work.request_id, ())
        if num_drafts > len(masks):
            return None
        mask = masks[num_drafts - 1]
        return NO_MASKS if mask is None else {work.request_id: mask}


class StepControls:
    """The computation between logits and tokens of one step."""

    def __init__(
        self, work: Sequence[TokenWork], end_token_ids: frozenset[int], masks: StepMasks
    ) -> None:
        self._work, self._ends, self._masks = work, end_token_ids, masks

    @torch.inference_mode()
    def adjust(self, logits: torch.Tensor) -> None:
        """Change a draft model's rows, as those of the model's logits will be.

        A row whose mask is late may have any token.
        """
        for row, item in zip(logits, self._work, strict=True):
            if item.past is not None:
                past = _past(item, item.proposed)
                adjust(row, item.spec.sampling, past, item.spec.prompt_tokens, self._ends)
                masks = self._masks.after(item, item.proposed) or NO_MASKS
                _bind(row, item.spec.sampling, item, past, masks)

    @torch.inference_mode()  # the mode in which modules computed the logits
    def draw(self, logits: torch.Tensor, rows: Sequence[RowSampling]) -> SampledPart:
        """Draw from the logits, float32 [n, vocabulary], and change them."""
        logits, scored = self._scores(logits)
        first_rows = list(rows)
        draws: list[_Draw] = []
        row = 0
        for item in self._work:
            if item.samples and not item.spec.sampling.is_plain:
                allowed = self._masks.after(item, 0) or NO_MASKS
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
        allowed: RowMasks,
        place: int = 0,
    ) -> "_Draw":
        """Change one row of logits for the token after ``place`` draft tokens."""
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
        """Draw the tokens after accepted draft tokens; return the logprobs to report."""
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
            allowed = self._masks.after(work, place + 1)
            if allowed is None:
                tokens[row + 1] = NOT_DRAWN
                break
            draw = self._begin(logits[row + 1], work, row + 1, allowed, place + 1)
        return tuple(reported)

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
    """A row of adjusted logits."""

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
    masks: RowMasks,
) -> bool:
    """Exclude tokens by a row's grammar and token lists; return whether any token is left.

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
