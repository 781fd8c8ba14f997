"""The recurrences of state mixers, over pieces of at most ``SCAN_TOKENS`` tokens.

A scan first computes everything that does not depend on the state for all pieces together, then
advances round by round (:mod:`kvell.models.states.scan_plan`). Everything is float32. A place
without a token holds zeros, which leave every state unchanged: no decay, nothing added.

Shapes: P pieces, L places, b pieces of a round, H heads, G groups of heads, N numbers of state per
channel, D channels of a head.
"""

from collections.abc import Callable
from typing import Protocol

import torch

Advance = Callable[[int, int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Advances pieces first … end-1 of a lane from states [b, …]; returns outputs [b, L, …] and states.
"""


class Scan(Protocol):
    """A recurrence with a layer's constants."""

    def prepare(self, *inputs: torch.Tensor) -> Advance:
        """Prepare inputs, [P, L, …] each, to be advanced round by round."""
        ...


class SelectiveScan:
    """Mamba 1: a state of N numbers per channel, each with its own decay.

    ``decays`` is [C, N], negative.
    """

    def __init__(self, decays: torch.Tensor) -> None:
        self._decays = decays

    def prepare(self, *inputs: torch.Tensor) -> Advance:
        """Take x and dt [P, L, C], and B and C [P, L, N]; advance states [b, C, N].

        Every number has its own decay, so matrix products over several tokens gain nothing: states
        advance token by token.
        """
        x, dt, write, read = inputs
        scaled = dt * x

        def advance(first: int, end: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            outputs = []
            for place in range(dt.shape[1]):
                at = (slice(first, end), place)
                decay = torch.exp(dt[at][:, :, None] * self._decays)
                added = scaled[at][:, :, None] * write[at][:, None, :]
                state = torch.addcmul(added, state, decay)
                outputs.append(torch.matmul(state, read[at][:, :, None])[:, :, 0])
            return torch.stack(outputs, 1), state

        return advance


class ScalarDecayScan:
    """Mamba 2: a state [D, N] per head, with one decay for the whole state.

    ``decays`` is [H], negative.
    """

    def __init__(self, decays: torch.Tensor) -> None:
        self._decays = decays

    def prepare(self, *inputs: torch.Tensor) -> Advance:
        """Take x [P, L, H, D], dt [P, L, H], and B and C [P, L, G, N]; advance [b, H, D, N]."""
        x, dt, write, read = (values.transpose(1, 2) for values in inputs)
        heads_per_group = x.shape[1] // write.shape[1]
        x = x * dt[..., None]
        within, from_start, to_end = decay_factors(dt * self._decays[:, None])
        scores = (read @ write.transpose(-1, -2)).repeat_interleave(heads_per_group, 1)
        write, read = (v.repeat_interleave(heads_per_group, 1) for v in (write, read))
        added = x.transpose(-1, -2) @ (write * to_end[..., None])
        inside = causal_product(scores * within, x)
        reads = read * from_start[..., None]
        kept = from_start[..., -1:, None]

        def advance(first: int, end: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            here = slice(first, end)
            output = inside[here] + reads[here] @ state.transpose(-1, -2)
            return output.transpose(1, 2), torch.addcmul(added[here], state, kept[here])

        return advance


def causal_product(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Multiply weights [·, L, L], of place j for i ≥ j, with values [·, L, V].

    Places after i are excluded from its sum: zero times NaN would be NaN.
    """
    if values.shape[-2] == 1:
        return weights @ values
    numbers = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    # Zeros, but NaN from the first place on whose value is infinite or NaN.
    spoiled = (values * 0.0).cumsum(-2)
    return weights.tril() @ numbers + spoiled


def decay_factors(
    log_decays: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turn log decays [P, H, L] into factors.

    Return the factors from place j to i ≥ j [P, H, L, L] (zero above), from the state before the
    piece to i, and from i to the state after it, both [P, H, L].

    Sums run over the places in between. Differences of sums from the start would lose small values
    after a large decay.
    """
    length = log_decays.shape[-1]
    from_start = log_decays.cumsum(-1).exp()
    if length == 1:
        return torch.ones_like(log_decays)[..., None], from_start, torch.ones_like(log_decays)
    below = torch.ones(length, length, dtype=torch.bool, device=log_decays.device).tril(-1)
    spread = log_decays[..., None].expand(*log_decays.shape, length)
    within = spread.masked_fill(~below, 0).cumsum(-2).exp().tril()
    return within, from_start, within[..., -1, :]
