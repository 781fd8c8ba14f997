"""Weights of int8 or int4, in groups of 32 numbers of a row (csrc/forward/matrix.h).

int8: ``scale · q``, q from -127 to 127; int4: ``scale · q + minimum``, q from 0 to 15.  Scales
and minima are in half precision, as in GGUF's Q8_0 and Q4_1.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch.nn import functional

GROUP = 32
MOST_EIGHT = 127
MOST_FOUR = 15
NUMBERS_AT_ONCE = 1 << 22
"""Numbers of a weight in blocks that are float32 at the same time."""


class Form(IntEnum):
    """The storage of a matrix's numbers; the compiled module uses the same values."""

    PLAIN = 0
    INT8 = 1
    INT4 = 2


@dataclass(frozen=True)
class GroupedWeight:
    """A quantised weight [out, width].

    :param quants: [out, width]; torch.int8 for int8, torch.uint8 for int4.
    :param scales: float16 [out, groups]; the last group of a row may be short.
    :param minima: float16 [out, groups] for int4; None for int8.
    """

    quants: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None

    @property
    def form(self) -> Form:
        return Form.INT8 if self.minima is None else Form.INT4

    @property
    def shape(self) -> tuple[int, int]:
        return self.quants.shape[0], self.quants.shape[1]

    def unpack(self) -> torch.Tensor:
        width = self.shape[1]
        made = self.quants.float() * _spread(self.scales, width)
        return made if self.minima is None else made + _spread(self.minima, width)


@dataclass(frozen=True)
class BlockWeight:
    """A weight in the blocks of its file, decoded when it is packed.

    :param kind: the file's name of the blocks, such as ``Q4_K``.
    :param form: the form of kernels that is nearest to them.
    :param numbers: returns the numbers of rows ``start`` to ``stop``, float32.
    :param own: returns the weight in ``form`` without any loss but that of its scales' rounding;
        None, or without a return value, if its numbers are quantised.
    """

    kind: str
    form: Form
    shape: tuple[int, int]
    numbers: Callable[[int, int], torch.Tensor]
    own: Callable[[], GroupedWeight | None] | None = None

    def to_form(self, form: Form) -> GroupedWeight:
        """Return the weight in a form, quantised a few rows after the others.

        :raises ValueError: if a number is infinite, or too large for a scale in half precision.
        """
        made = self.own() if self.own is not None and form is self.form else None
        return made or join_rows([quantise(part, form) for part in self._parts()], torch.cat)

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.cat([part.to(dtype) for part in self._parts()])

    def _parts(self) -> Iterator[torch.Tensor]:
        rows, width = self.shape
        step = max(1, NUMBERS_AT_ONCE // width)
        return (self.numbers(row, min(row + step, rows)) for row in range(0, rows, step))


def quantise(weight: torch.Tensor, form: Form) -> GroupedWeight:
    """Quantise a weight [out, width] to the nearest numbers of a form.

    :raises ValueError: if a number is infinite, or too large for a scale in half precision.
    """
    width = weight.shape[1]
    rows = functional.pad(weight.detach().float(), (0, -width % GROUP))
    rows = rows.view(weight.shape[0], -1, GROUP)
    # Padding must not widen a group's range, so it repeats the row's last number.
    if width % GROUP:
        rows[:, -1, width % GROUP :] = rows[:, -1, width % GROUP - 1, None]
    made = _int8(rows) if form is Form.INT8 else _int4(rows)
    if not made.scales.isfinite().all() or not rows.isfinite().all():
        raise ValueError("weight: its numbers are not finite, or too large for half precision")
    return GroupedWeight(made.quants.flatten(1)[:, :width], made.scales, made.minima)


def join_rows(
    weights: Sequence[GroupedWeight], join: Callable[[list[torch.Tensor]], torch.Tensor]
) -> GroupedWeight:
    minima = [weight.minima for weight in weights if weight.minima is not None]
    return GroupedWeight(
        join([weight.quants for weight in weights]),
        join([weight.scales for weight in weights]),
        join(minima) if minima else None,
    )


def widen_grouped(weight: GroupedWeight, width: int) -> GroupedWeight:
    """Add inputs at the end of every row; they may be multiplied by zeros only."""
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
    """Quantise between a group's smallest and largest number; zero may not be exact."""
    minima = rows.amin(-1).half()
    scales = ((rows.amax(-1) - minima.float()) / MOST_FOUR).clamp_min(0).half()
    quants = ((rows - minima.float()[..., None]) / _divisor(scales)).round().clamp(0, MOST_FOUR)
    return GroupedWeight(quants.to(torch.uint8), scales, minima)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    wide = scales.float()[..., None]
    return torch.where(wide == 0, 1.0, wide)


def _spread(values: torch.Tensor, width: int) -> torch.Tensor:
    """Convert float16 [out, groups] → float32 [out, width]."""
    return values.float().repeat_interleave(GROUP, 1)[:, :width]
