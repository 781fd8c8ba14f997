"""Weights of eight or four bits, in groups of 32 numbers of a row (csrc/forward/matrix.h).

eights: ``scale · q``, q from -127 to 127; fours: ``scale · q + minimum``, q from 0 to 15.  Scales
and minima are in half precision: what GGUF's Q8_0 and Q4_1 say too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch.nn import functional

GROUP = 32
MOST_EIGHT = 127
MOST_FOUR = 15


class Form(IntEnum):
    """How a matrix's numbers lie; the compiled module knows them by these numbers."""

    PLAIN = 0
    INT8 = 1
    INT4 = 2


@dataclass(frozen=True)
class GroupedWeight:
    """A weight [out, width].

    :param quants: [out, width], int8 of eights, uint8 of fours.
    :param scales: float16 [out, groups]; the last group of a row may be short.
    :param minima: float16 [out, groups], of fours.
    """

    quants: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None

    @property
    def form(self) -> Form:
        """Eights or fours."""
        return Form.INT8 if self.minima is None else Form.INT4

    @property
    def shape(self) -> tuple[int, int]:
        """(out, width)."""
        return self.quants.shape[0], self.quants.shape[1]

    def unpacked(self) -> torch.Tensor:
        """The numbers themselves, float32 [out, width]."""
        width = self.shape[1]
        made = self.quants.float() * _spread(self.scales, width)
        return made if self.minima is None else made + _spread(self.minima, width)


def grouped(weight: torch.Tensor, form: Form) -> GroupedWeight:
    """The nearest numbers of a form to a weight [out, width].

    :raises ValueError: if a number is infinite, or too large for a scale in half precision.
    """
    width = weight.shape[1]
    rows = functional.pad(weight.detach().float(), (0, -width % GROUP))
    rows = rows.view(weight.shape[0], -1, GROUP)
    # What rows are filled up with must not widen a group's range: their last number repeats.
    if width % GROUP:
        rows[:, -1, width % GROUP :] = rows[:, -1, width % GROUP - 1, None]
    made = _int8(rows) if form is Form.INT8 else _int4(rows)
    if not made.scales.isfinite().all() or not rows.isfinite().all():
        raise ValueError("weight: its numbers are not finite, or too large for half precision")
    return GroupedWeight(made.quants.flatten(1)[:, :width], made.scales, made.minima)


def joined(
    weights: Sequence[GroupedWeight], join: Callable[[list[torch.Tensor]], torch.Tensor]
) -> GroupedWeight:
    """One weight out of the rows of several, which have the same form and width."""
    minima = [one.minima for one in weights if one.minima is not None]
    return GroupedWeight(
        join([one.quants for one in weights]),
        join([one.scales for one in weights]),
        join(minima) if minima else None,
    )


def widened(weight: GroupedWeight, width: int) -> GroupedWeight:
    """With inputs added at the end of every row, of which only zeros may be multiplied."""
    groups = -(-width // GROUP)

    def filled(values: torch.Tensor, size: int) -> torch.Tensor:
        return functional.pad(values, (0, size - values.shape[1]))

    return GroupedWeight(
        filled(weight.quants, width),
        filled(weight.scales, groups),
        None if weight.minima is None else filled(weight.minima, groups),
    )


def _int8(rows: torch.Tensor) -> GroupedWeight:
    scales = (rows.abs().amax(-1) / MOST_EIGHT).half()
    quants = (rows / _divisor(scales)).round().clamp(-MOST_EIGHT, MOST_EIGHT)
    return GroupedWeight(quants.to(torch.int8), scales, None)


def _int4(rows: torch.Tensor) -> GroupedWeight:
    """From the least to the largest number of a group; zero is not always one of them."""
    minima = rows.amin(-1).half()
    scales = ((rows.amax(-1) - minima.float()) / MOST_FOUR).clamp_min(0).half()
    quants = ((rows - minima.float()[..., None]) / _divisor(scales)).round().clamp(0, MOST_FOUR)
    return GroupedWeight(quants.to(torch.uint8), scales, minima)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    wide = scales.float()[..., None]
    return torch.where(wide == 0, 1.0, wide)


def _spread(values: torch.Tensor, width: int) -> torch.Tensor:
    """float16 [out, groups] → float32 [out, width]."""
    return values.float().repeat_interleave(GROUP, 1)[:, :width]
