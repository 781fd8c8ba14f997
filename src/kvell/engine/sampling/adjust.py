"""Penalties and biases of a request, applied to its logits."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from kvell.engine.protocol.sampling_params import ALL_TOKENS, SamplingParams
from kvell.engine.sampling.reasoning_budget import forced_token

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
    :param end_token_ids: tokens that end an answer.
    """
    output = past[prompt_tokens:]
    window = params.repeat_last_n
    first = 0 if window == ALL_TOKENS else max(0, len(past) - window)
    if params.repetition_penalty != 1.0:
        _repetition(logits, _distinct(past[first:]), params.repetition_penalty)
    penalized = past[max(first, prompt_tokens) :]
    if (params.presence_penalty or params.frequency_penalty) and len(penalized):
        tokens, counts = np.unique(penalized, return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * counts
        logits[_on(logits, tokens)] -= _on(logits, penalty.astype(np.float32))
    if params.logit_bias:
        tokens = np.fromiter(params.logit_bias, np.int64)
        biases = np.fromiter(params.logit_bias.values(), np.float32)
        logits[_on(logits, tokens)] += _on(logits, biases)
    if len(output) < params.min_tokens:
        ends = {*params.stop_token_ids, *end_token_ids}.intersection(range(len(logits)))
        logits[_on(logits, np.array(sorted(ends), np.int64))] = -torch.inf
    if params.reasoning_budget is not None:
        _force(logits, forced_token(params.reasoning_budget, output))


def _force(logits: torch.Tensor, token: int | None) -> None:
    """Exclude all tokens but a forced one, if there is one and the model has it."""
    if token is not None and token < len(logits):
        logits.fill_(-torch.inf)
        logits[token] = 0.0


def _repetition(logits: torch.Tensor, tokens: Ints, penalty: float) -> None:
    """Penalise tokens as CTRL (Keskar et al., 2019) and transformers do."""
    there = _on(logits, tokens)
    scores = logits[there]
    logits[there] = torch.where(scores < 0, scores * penalty, scores / penalty)


def _distinct(tokens: Ints) -> Ints:
    distinct: Ints = np.unique(tokens)
    return distinct[distinct >= 0]


def _on(logits: torch.Tensor, values: npt.NDArray[np.generic]) -> torch.Tensor:
    """Return the values on the device of the logits, integers as int64."""
    wide = values.astype(np.int64) if values.dtype.kind == "i" else values
    return torch.from_numpy(wide).to(logits.device)
