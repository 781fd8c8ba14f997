"""The parts of a recipe: norms, rotations, and linears with input and output factors.

Models with multipliers have factors. They are kept in float32 next to a weight: multiplied into 16
bits they would be rounded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Joined = Callable[[list[torch.Tensor]], torch.Tensor]
"""Joins the outputs of linears that are packed together."""


@dataclass(frozen=True)
class NormRecipe:
    """A norm; ``weight``, float32 [size], multiplies a normalised row."""

    weight: torch.Tensor
    epsilon: float


@dataclass(frozen=True)
class RopeRecipe:
    """A rotation: ``frequencies``, float32 [head_size / 2]; ``factor`` of cosines and sines."""

    frequencies: torch.Tensor
    factor: float


@dataclass(frozen=True)
class ScaledLinear:
    """``outputs · (W (inputs · x) + bias)``.

    :param outputs: one factor, or float32 [out].
    """

    linear: Any
    inputs: float = 1.0
    outputs: float | torch.Tensor = 1.0

    @property
    def factors(self) -> torch.Tensor:
        """Factors of the sums before the bias, float32 [out]."""
        return self._by_output() * self.inputs

    @property
    def bias(self) -> torch.Tensor | None:
        """Bias that is added after the factors, float32 [out]; None if there is none."""
        bias = self.linear.bias
        return None if bias is None else bias.detach().float() * self._by_output()

    def _by_output(self) -> torch.Tensor:
        return torch.ones(self.linear.out_features) * self.outputs


def joined_factors(linears: Sequence[ScaledLinear], join: Joined) -> torch.Tensor | None:
    """Return the factors of linears that are packed together; None if all are 1."""
    factors = [scaled.factors for scaled in linears]
    return None if all(bool((factor == 1).all()) for factor in factors) else join(factors)


def joined_bias(linears: Sequence[ScaledLinear], join: Joined) -> torch.Tensor | None:
    """Return the bias of linears that are packed together; None if none has one."""
    biases = [scaled.bias for scaled in linears]
    if all(bias is None for bias in biases):
        return None
    return join(
        [
            torch.zeros(scaled.linear.out_features) if bias is None else bias
            for scaled, bias in zip(linears, biases, strict=True)
        ]
    )
