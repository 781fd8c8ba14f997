"""Matrices of quantised checkpoints in the forms of the compiled kernels.

All but those of experts are integers or small floats with a grid of scales and zero points::

    number [row, column] = scale · (quant − zero)       scale, zero: [row // rows, group of column]

Kernels have a half-precision scale for each 32 numbers of a row (``fused/grouped``). Integers whose
groups are whole multiples of 32 are taken as they are; other weights are quantised from their
numbers, a few rows at a time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kvell.errors import ChangeSomething
from kvell.models.config.json_files import FETCH_MODEL_AGAIN
from kvell.models.families.quantised_schemes import Packing, QuantisedScheme
from kvell.models.fused.grouped import GROUP, MOST_EIGHT, BlockWeight, Form, GroupedWeight

Parts = Mapping[str, torch.Tensor]
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each of eight outputs among the four-bit numbers of a word, lowest first."""
FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of 4-bit floats (e2m1), by their low three bits."""
EXPONENT_BIAS = 127
ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class _Quants:
    """A matrix of quants with their scales.

    :param scales: float32 [grid rows, groups].
    :param zeros: float32 [grid rows, groups], or one for all.
    :param group_of: the group of each input.
    """

    scheme: QuantisedScheme
    numbers: torch.Tensor
    shape: tuple[int, int]
    scales: torch.Tensor
    zeros: torch.Tensor
    group_of: torch.Tensor

    def as_blocks(self, form: Form, own: Callable[[], GroupedWeight | None] | None) -> BlockWeight:
        return BlockWeight(self.scheme.method, form, self.shape, self.numbers_of, own)

    def numbers_of(self, start: int, stop: int) -> torch.Tensor:
        scales, zeros = self._grid(start, stop, self.group_of)
        return (self._quants(start, stop).float() - zeros) * scales

    def four_bits(self) -> GroupedWeight | None:
        scales, zeros = self._grid(0, self.shape[0], self.group_of[::GROUP])
        return _finite(GroupedWeight(self._all_quants(), scales.half(), (-scales * zeros).half()))

    def eight_bits(self) -> GroupedWeight | None:
        """Return the integers as they are; None if one has no magnitude in a signed byte."""
        scales, zeros = self._grid(0, self.shape[0], self.group_of[::GROUP])
        quants = self._all_quants()
        low, high = quants.min() - zeros.max(), quants.max() - zeros.min()
        if low < -MOST_EIGHT or high > MOST_EIGHT:
            return None
        columns = torch.arange(self.shape[1]) // GROUP
        signed = [
            (quants[rows].short() - zeros[rows][:, columns].short()).to(torch.int8)
            for rows in self._pieces()
        ]
        return _finite(GroupedWeight(torch.cat(signed), scales.half(), None))

    def _all_quants(self) -> torch.Tensor:
        return torch.cat([self._quants(rows.start, rows.stop) for rows in self._pieces()])

    def _pieces(self) -> list[slice]:
        out = self.shape[0]
        return [slice(row, min(row + ROWS_AT_ONCE, out)) for row in range(0, out, ROWS_AT_ONCE)]

    def _quants(self, start: int, stop: int) -> torch.Tensor:
        """Return the quants of rows, in the dtype of their file or as uint8."""
        bits = self.scheme.bits
        match self.scheme.packing:
            case Packing.AWQ:
                words = self.numbers[:, start // 8 : -(-stop // 8)].contiguous()
                quants = _outputs_in_order(_unpack(words, bits))
                return quants[:, start % 8 :][:, : stop - start].T.contiguous()
            case Packing.GPTQ:
                return _unpack(self.numbers[:, start:stop].T.contiguous(), bits)
            case Packing.PACKED:
                return _unpack(self.numbers[start:stop].contiguous(), bits)
        return self.numbers[start:stop]

    def _grid(
        self, start: int, stop: int, columns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.arange(start, stop) // (self.scheme.rows or self.shape[0])
        zeros = self.zeros.expand(self.scales.shape)
        return self.scales[rows][:, columns], zeros[rows][:, columns]


def blocks_of_matrix(
    name: str, shape: tuple[int, ...], scheme: QuantisedScheme, parts: Parts
) -> BlockWeight:
    """Return a matrix whose numbers are read when it is packed.

    :param parts: its ``numbers``, ``scales``, and perhaps ``zeros`` and ``groups``.
    :raises ChangeSomething: if an input has a group that is not there.
    """
    if scheme.packing is Packing.EXPERTS:
        return _experts(shape, parts["numbers"], parts["scales"])
    out, width = shape
    group_of, is_ordered = _groups(name, width, scheme, parts.get("groups"))
    grid = (-(-out // (scheme.rows or out)), -(-width // (scheme.columns or width)))
    scales = _scales(parts["scales"], scheme, grid)
    zeros = _zeros(parts.get("zeros"), scheme, grid)
    quants = _Quants(scheme, parts["numbers"], (out, width), scales, zeros, group_of)
    has_groups = is_ordered and scheme.columns % GROUP == 0
    if not has_groups or scheme.packing is Packing.FLOATS:
        return quants.as_blocks(Form.INT8, None)
    if scheme.bits == 4:
        return quants.as_blocks(Form.INT4, quants.four_bits)
    return quants.as_blocks(Form.INT8, quants.eight_bits)


def _experts(shape: tuple[int, ...], numbers: torch.Tensor, scales: torch.Tensor) -> BlockWeight:
    """Return 4-bit floats of experts, one row each, as transformers has them: [inputs, outputs].

    A byte has two numbers, the lower bits' first; a group's scale is a power of two.
    """
    table = torch.tensor([*FOUR_BITS, *(-value for value in FOUR_BITS)])
    experts, width, out = shape

    def decode(start: int, stop: int) -> torch.Tensor:
        exponents = scales[start:stop].int() - EXPONENT_BIAS
        both = numbers[start:stop].int()
        values = torch.stack([table[both & 15], table[both >> 4]], -1).flatten(-2)
        scaled = torch.ldexp(values, exponents[..., None])
        return scaled.view(stop - start, out, width).transpose(1, 2).flatten(1)

    return BlockWeight("mxfp4", Form.INT8, (experts, width * out), decode)


def _groups(
    name: str, width: int, scheme: QuantisedScheme, given: torch.Tensor | None
) -> tuple[torch.Tensor, bool]:
    """Return the group of each input, and whether groups are of neighbours.

    :raises ChangeSomething: if the file names a group that is not there.
    """
    usual = torch.arange(width) // (scheme.columns or width)
    if given is None or torch.equal(given.long(), usual):
        return usual, True
    groups = given.long()
    if not 0 <= int(groups.min()) <= int(groups.max()) <= int(usual[-1]):
        problem = f"its inputs have groups beyond {int(usual[-1])}"
        raise ChangeSomething("model", name, problem, FETCH_MODEL_AGAIN)
    return groups, False


def _scales(stored: torch.Tensor, scheme: QuantisedScheme, grid: tuple[int, int]) -> torch.Tensor:
    if stored.dtype == torch.uint8:
        return torch.ldexp(torch.ones(grid), stored.reshape(grid).int() - EXPONENT_BIAS)
    if scheme.packing in (Packing.AWQ, Packing.GPTQ):
        stored = stored.T
    return stored.float().reshape(grid)


def _zeros(
    stored: torch.Tensor | None, scheme: QuantisedScheme, grid: tuple[int, int]
) -> torch.Tensor:
    """Return zero points in units of quants; packed integers of a symmetric scheme have half."""
    bits = scheme.bits
    if stored is None:
        return torch.tensor(2.0 ** (bits - 1) if scheme.packing is Packing.PACKED else 0.0)
    match scheme.packing:
        case Packing.AWQ:
            stored = _outputs_in_order(_unpack(stored, bits)).T
        case Packing.GPTQ:
            unpacked = _unpack(stored, bits)[:, : grid[0]].T.int()
            stored = (unpacked + scheme.zero_offset) % (1 << bits)
        case Packing.PACKED:
            stored = _unpack(stored.T.contiguous(), bits)[:, : grid[0]].T
    return stored.float().reshape(grid)


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack int32 words [rows, n], whose lowest bits are first → uint8 [rows, n · 32 / bits]."""
    quants = words.contiguous().view(torch.uint8)
    return quants if bits == 8 else torch.stack([quants & 15, quants >> 4], -1).flatten(1)


def _outputs_in_order(quants: torch.Tensor) -> torch.Tensor:
    return quants.view(quants.shape[0], -1, 8)[:, :, AWQ_PLACES].flatten(1)


def _finite(weight: GroupedWeight) -> GroupedWeight | None:
    """Return a weight whose scales fit half precision; None: its numbers are quantised."""
    kept = [weight.scales] if weight.minima is None else [weight.scales, weight.minima]
    return weight if all(bool(values.isfinite().all()) for values in kept) else None
