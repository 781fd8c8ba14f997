"""Sampling that is not plain: penalties, biases, grammars, token lists, and logprobs.

::

    work ──► begin ──► masks ───────────────────┐
             pass  ──► logits ──► logprobs of the prompt's tokens
                              └──► adjusted ──► drawn ──► logprob of the token

A step with plain sampling does not use this module.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import isnan

import torch

from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.engine.requests.plan import NO_TOKEN, TokenWork
from kvell.engine.sampling.adjust import Ints, adjust
from kvell.engine.sampling.draw import RowSampling, sample
from kvell.engine.sampling.grammars import Allowed, Grammars, MaskedRequest
from kvell.engine.sampling.likelihood import all_token_logprobs, token_logprobs
from kvell.engine.sampling.permitted import permitted_tokens
from kvell.vocabulary import RequestId

Masks = Future[dict[RequestId, Allowed | None]]


@dataclass
class SampledPart:
    """The results of a model's part of a step.

    :param tokens: a token for each row that draws, in order of the work.
    :param logprobs: logprobs of the drawn token by handle, for requests that asked for them.
    :param scored: logprobs of the prompt tokens after the computed ones, by handle; empty if
        logits are NaN or infinite.
    :param pooled: vectors of prompts by handle, as little-endian float32 bytes; empty if numbers
        are NaN or infinite.
    """

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
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
        masks = self.grammars.masks(wanted) if wanted and self.grammars is not None else None
        return StepControls(work, masks, self._ends)


class StepControls:
    """The computation between logits and tokens of one step.

    :param masks: masks of requests with a grammar; None without such requests.
    """

    def __init__(
        self,
        work: Sequence[TokenWork],
        masks: Masks | None,
        end_token_ids: frozenset[int],
    ) -> None:
        self._work, self._masks, self._ends = work, masks, end_token_ids

    @torch.inference_mode()  # the mode in which modules computed the logits
    def draw(self, logits: torch.Tensor, rows: Sequence[RowSampling]) -> SampledPart:
        """Draw from the logits, float32 [n, vocabulary], and change them.

        :param rows: sampling of the rows that draw.
        """
        logits, scored = self._scores(logits)
        allowed = {} if self._masks is None else self._masks.result()
        reported: dict[int, tuple[int, torch.Tensor, int]] = {}
        stuck: list[int] = []
        row = 0
        for item in self._work:
            if not item.samples:
                continue
            params = item.spec.sampling
            if params.logprobs is not None:
                reported[item.handle] = (row, logits[row].clone(), params.logprobs)
            if not params.is_plain:
                self._adjust(logits[row], params, item)
                if not _bind(logits[row], params, item, allowed):
                    stuck.append(row)
            row += item.num_draws
        tokens = sample(logits, rows)
        for stuck_row in stuck:
            tokens[stuck_row] = NO_TOKEN
        logprobs = {
            handle: token_logprobs(raw, tokens[row], num_top)
            for handle, (row, raw, num_top) in reported.items()
            if tokens[row] >= 0
        }
        return SampledPart(tokens, logprobs, scored)

    def _adjust(self, logits: torch.Tensor, params: SamplingParams, work: TokenWork) -> None:
        adjust(logits, params, _past(work), work.spec.prompt_tokens, self._ends)

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


def _past(work: TokenWork) -> Ints:
    assert work.past is not None, "sampling that looks back is planned with its past"
    return work.past


def _masked(work: TokenWork, form: StructuredOutputs) -> MaskedRequest:
    output = _past(work)[work.spec.prompt_tokens :]
    return MaskedRequest(work.spec.request_id, form, output, work.spec.tenant)


def _bind(
    logits: torch.Tensor,
    params: SamplingParams,
    work: TokenWork,
    masks: Mapping[RequestId, Allowed | None],
) -> bool:
    """Exclude tokens by a row's grammar and token lists; return whether any token is left.

    :param masks: masks of requests whose grammar is active; None if it allows no token.
    """
    allowed = masks.get(work.spec.request_id)
    is_masked = work.spec.request_id in masks
    if params.is_bounded and (allowed is not None or not is_masked):
        output = _past(work)[work.spec.prompt_tokens :]
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
