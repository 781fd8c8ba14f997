"""Merging of partial attention: the parts' maxima and denominators weigh their outputs.

Infinite-LLM (DistAttention) equations 2 and 3: with m the largest of the parts'
maxima and e_j their denominators, the whole is Σ o_j·e_j·exp(m_j-m) / Σ e_j·exp(m_j-m).
"""

from collections.abc import Sequence

import torch

from kvell.attention.interface import Partial


def merge(partials: Sequence[Partial], sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Return attention over the whole context from its parts, float32 [T, heads, head_size].

    The parts cover disjoint positions, in any order, and are added in the order given.  Rows
    that are empty in every part become 0.

    :param sinks: float32 [heads], a logit per head that joins the denominator only.
    :raises ValueError: if there is no part.
    """
    if not partials:
        raise ValueError("merge needs at least one partial")
    whole = merge_partials(partials)
    return whole.output if sinks is None else whole.output * sink_share(whole, sinks)[..., None]


def merge_partials(partials: Sequence[Partial]) -> Partial:
    maximum = torch.stack([part.maximum for part in partials]).amax(0)
    weights = [part.denominator * _shrink(part.maximum, maximum) for part in partials]
    denominator = torch.stack(weights).sum(0)
    output = torch.zeros_like(partials[0].output)
    for part, weight in zip(partials, weights, strict=True):
        output += part.output * weight[..., None]
    return Partial(output / _divisor(denominator)[..., None], maximum, denominator)


def sink_share(whole: Partial, sinks: torch.Tensor) -> torch.Tensor:
    """Return the share of each row's weight that sinks do not take: [T, heads] in (0, 1]."""
    maximum = torch.maximum(whole.maximum, sinks.expand_as(whole.maximum))
    kept = whole.denominator * _shrink(whole.maximum, maximum)
    return kept / _divisor(kept + _shrink(sinks.expand_as(maximum), maximum))


def _shrink(maximum: torch.Tensor, new_maximum: torch.Tensor) -> torch.Tensor:
    """Return exp(maximum - new_maximum), or 0 where the part is empty (also if all are)."""
    return torch.where(maximum == -torch.inf, 0.0, torch.exp(maximum - new_maximum))


def _divisor(denominator: torch.Tensor) -> torch.Tensor:
    """Return the denominator with 1 in place of 0, so that empty rows stay 0."""
    return torch.where(denominator == 0, 1.0, denominator)
