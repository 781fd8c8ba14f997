"""The delta rule: a token corrects the value that its key would read from the state.

Within a piece, the corrections of all tokens are the solution of one triangular system (the UT
transform of DeltaNet). Shapes, as in :mod:`kvell.models.states.scans`: H heads, K numbers of a key,
V of a value, P pieces, L places, b pieces of a round.
"""

import torch

from kvell.models.states.scans import Advance, causal_product, decay_factors

CHANNEL_TOKENS = 16
"""Places computed together if every number of a key has its own decay: the decays between all pairs
of places are L × L × K numbers."""


class GatedDeltaScan:
    """A scan with one decay for a head's whole state [K, V]."""

    def prepare(self, *inputs: torch.Tensor) -> Advance:
        """Take q and k [P, L, H, K] (normalised, q scaled), v [P, L, H, V], and log decay and
        beta [P, L, H]; advance states [b, H, K, V]."""
        query, key, value, decay, beta = (values.transpose(1, 2) for values in inputs)
        within, from_start, to_end = decay_factors(decay)
        value = value * beta[..., None]
        scaled_key = key * beta[..., None]
        reads = scaled_key * from_start[..., None]
        value, reads = _corrected((scaled_key @ key.transpose(-1, -2)) * within, value, reads)
        parts = (
            value,
            reads,
            (query @ key.transpose(-1, -2)) * within,
            query * from_start[..., None],
            (key * to_end[..., None]).transpose(-1, -2),
            from_start[..., -1:, None],
        )

        def advance(first: int, end: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            output, state = _advance(state, *(part[first:end] for part in parts))
            return output.transpose(1, 2), state

        return advance


class ChannelDeltaScan:
    """A scan with one decay for every number of a key (Kimi's delta attention)."""

    def prepare(self, *inputs: torch.Tensor) -> Advance:
        """Take q and k [P, L, H, K] (normalised, q scaled), v [P, L, H, V], log decay
        [P, L, H, K] and beta [P, L, H]; advance [b, H, K, V], ``CHANNEL_TOKENS`` at a time."""
        by_head = [values.transpose(1, 2) for values in inputs]

        def advance(first: int, end: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            outputs = []
            for start in range(0, by_head[0].shape[2], CHANNEL_TOKENS):
                places = slice(start, start + CHANNEL_TOKENS)
                output, state = _few_places(state, *(v[first:end, :, places] for v in by_head))
                outputs.append(output)
            return torch.cat(outputs, 2).transpose(1, 2), state

        return advance


def _few_places(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [b, H, l, V] of l places and the states after, from states [b, H, K, V]."""
    factors = decay_factors(log_decay.transpose(-1, -2))
    within = factors[0].permute(0, 1, 3, 4, 2)
    from_start, to_end = (factor.transpose(-1, -2) for factor in factors[1:])
    scaled_key = key * beta[..., None]
    decayed = key[:, :, None] * within
    value, reads = _corrected(
        torch.einsum("bhik,bhijk->bhij", scaled_key, decayed),
        value * beta[..., None],
        scaled_key * from_start,
    )
    scores = torch.einsum("bhik,bhijk->bhij", query, decayed)
    to_state = (key * to_end).transpose(-1, -2)
    return _advance(
        state, value, reads, scores, query * from_start, to_state, from_start[..., -1, :, None]
    )


def _corrected(
    system: torch.Tensor, value: torch.Tensor, reads: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Solve for each token's writes and reads after the corrections of earlier tokens.

    :param system: [·, L, L], reads of a token's key from each earlier token's key; the diagonal is
        taken as ones.
    """
    if system.shape[-1] == 1:
        return value, reads
    both = torch.linalg.solve_triangular(
        system, torch.cat((value, reads), -1), upper=False, unitriangular=True
    )
    return both[..., : value.shape[-1]], both[..., value.shape[-1] :]


def _advance(
    state: torch.Tensor,
    value: torch.Tensor,
    reads: torch.Tensor,
    scores: torch.Tensor,
    query: torch.Tensor,
    to_state: torch.Tensor,
    decay: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [b, H, L, V] and the states after; ``to_state`` is [b, H, K, L]."""
    corrections = value - reads @ state
    output = query @ state + causal_product(scores, corrections)
    return output, torch.addcmul(to_state @ corrections, state, decay)
