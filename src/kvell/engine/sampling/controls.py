"""Sampling that is not plain: penalties, biases, grammars, lists, and how likely tokens were.

::

    work ──► begin ──► masks are computed ──────┐
             pass  ──► logits ──► scores of the prompt's tokens
                              └──► adjusted ──► drawn ──► how likely that token was

A step in which all sampling is plain never comes here.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import isnan

import torch

from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.plan import NO_TOKEN, TokenWork
from kvell.engine.sampling.adjust import Ints, adjust
from kvell.engine.sampling.draw import RowSampling, sample
from kvell.engine.sampling.grammars import Allowed, Grammars, Wanted
from kvell.engine.sampling.likelihood import all_token_logprobs, token_logprobs
from kvell.engine.sampling.permitted import permitted_tokens

Masks = Future[dict[int, Allowed | None]]


@dataclass
class Drawn:
    """What a model's part of a step yields.

    :param tokens: one for each row that draws, in order of the work.
    :param logprobs: of the token drawn for a handle, where asked.
    :param scored: how likely the prompt's tokens behind those computed were, by handle; empty where
        logits are no numbers.
    :param pooled: vectors of prompts by handle, as little-endian float32 bytes; empty likewise.
    """

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    scored: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    pooled: dict[int, bytes] = field(default_factory=dict)


class Controls:
    """What one model's requests ask of their sampling.

    :param grammars: None if the model has no tokenizer.
    :param end_token_ids: tokens that end an answer.
    """

    def __init__(self, grammars: Grammars | None = None, end_token_ids: Iterable[int] = ()) -> None:
        self.grammars = grammars
        self._ends = frozenset(end_token_ids)

    def begin(self, work: Sequence[TokenWork]) -> "StepControls | None":
        """Begin to compute masks for a step; None if all of its sampling is plain."""
        if all(one.past is None for one in work):
            return None
        wanted = [
            Wanted(one.handle, one.sampling.structured_outputs, _past(one)[one.prompt_tokens :])
            for one in work
            if one.sampling is not None and one.sampling.structured_outputs is not None
        ]
        masks = self.grammars.masks(wanted) if wanted and self.grammars is not None else None
        return StepControls(work, masks, self._ends)

    def release(self, handles: Iterable[int]) -> None:
        """Forget requests that hold no pages any more."""
        if self.grammars is not None:
            self.grammars.release(handles)


class StepControls:
    """Of one step: what happens between logits and tokens.

    :param masks: of requests with a grammar; None if there are none.
    """

    def __init__(
        self,
        work: Sequence[TokenWork],
        masks: Masks | None,
        end_token_ids: frozenset[int],
    ) -> None:
        self._work, self._masks, self._ends = work, masks, end_token_ids

    @torch.inference_mode()  # in which a pass of modules made the logits
    def draw(self, logits: torch.Tensor, rows: Sequence[RowSampling]) -> Drawn:
        """Draw from the logits, float32 [n, vocabulary], which are changed.

        :param rows: for the rows that draw.
        """
        logits, scored = self._scores(logits)
        allowed = {} if self._masks is None else self._masks.result()
        told: dict[int, tuple[int, torch.Tensor, int]] = {}
        stuck: list[int] = []
        row = 0
        for one in self._work:
            params = one.sampling
            if params is None:
                continue
            if params.logprobs is not None:
                told[one.handle] = (row, logits[row].clone(), params.logprobs)
            if not params.is_plain:
                self._adjust(logits[row], params, one)
                if not _bind(logits[row], params, one, allowed):
                    stuck.append(row)
            row += one.num_draws
        tokens = sample(logits, rows)
        for stuck_row in stuck:
            tokens[stuck_row] = NO_TOKEN
        logprobs = {
            handle: token_logprobs(raw, tokens[row], most)
            for handle, (row, raw, most) in told.items()
            if tokens[row] >= 0
        }
        return Drawn(tokens, logprobs, scored)

    def _adjust(self, logits: torch.Tensor, params: SamplingParams, work: TokenWork) -> None:
        adjust(logits, params, _past(work), work.prompt_tokens, self._ends)

    def _scores(
        self, logits: torch.Tensor
    ) -> tuple[torch.Tensor, dict[int, tuple[TokenLogprobs, ...]]]:
        """The rows that draw, and how likely the prompts' tokens behind scored work are."""
        if all(one.scores is None for one in self._work):
            return logits, {}
        scored: dict[int, tuple[TokenLogprobs, ...]] = {}
        kept: list[int] = []
        start = 0
        for one in self._work:
            end = start + one.num_logits
            if one.scores is not None:
                following = _past(one)[one.start + 1 : one.start + one.count + 1]
                following = following[: one.prompt_tokens - one.start - 1]
                if len(following):
                    some = logits[start : start + len(following)]
                    told = all_token_logprobs(some, following.tolist(), one.scores)
                    scored[one.handle] = () if any(isnan(each.logprob) for each in told) else told
            kept.extend(range(end - one.num_draws, end))
            start = end
        return logits[kept], scored


def _past(work: TokenWork) -> Ints:
    assert work.past is not None, "sampling that looks back is planned with its past"
    return work.past


def _bind(
    logits: torch.Tensor,
    params: SamplingParams,
    work: TokenWork,
    masks: Mapping[int, Allowed | None],
) -> bool:
    """Exclude what a row's grammar or its own lists exclude; return whether anything is left.

    :param masks: of requests whose grammar binds them now; None for one that allows nothing.
    """
    allowed = masks.get(work.handle)
    if params.is_bounded and (allowed is not None or work.handle not in masks):
        output = _past(work)[work.prompt_tokens :]
        return _keep(logits, permitted_tokens(params, output, len(logits), allowed))
    return work.handle not in masks or _keep(logits, allowed)


def _keep(logits: torch.Tensor, allowed: Allowed | None) -> bool:
    """Exclude all tokens that are not allowed; return whether any is left.

    ``min_tokens`` gives way where it hides every token that is allowed: the text is complete then.
    """
    if allowed is None or not allowed.any():
        return False
    there = torch.from_numpy(allowed).to(logits.device)
    logits[~there] = -torch.inf
    if torch.isneginf(logits).all():
        logits[there] = 0.0
    return True
