"""Packing of weights in the order in which the compiled pass streams them (csrc/forward/matrix.h).

A weight is cut into panels of 32 outputs. A panel holds, for each item of the input, the 32 outputs
side by side. An item is 32 bits: a float32, or two neighbouring bfloat16. int8 and int4 weights
have the same order of items, by groups. All matrices of a model are stored one after another in
order of use, in huge pages if the system has them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvell.device.weight_memory import PrivateWeights, WeightMemory
from kvell.models.fused.grouped import GROUP, Form, GroupedWeight

PANEL = 32
ALIGN_BYTES = 128
STEPS_OF_A_WORD = 4
"""Number of steps whose 4-bit numbers share 16 bits."""

_ELEMENTS = (torch.float32, torch.bfloat16)

Shape = tuple[int, int, Form]
"""A matrix's outputs, inputs and form."""


@dataclass(frozen=True)
class PackedMatrix:
    """A weight's address, and its float32 bias [outputs, padded to panels], if it has one.

    :param factors: multiply the sums before the bias; float32, padded in the same way, or None.
    :param out: real outputs; further ones of the last panel are zero.
    """

    address: int
    factors: torch.Tensor | None
    bias: torch.Tensor | None
    out: int
    width: int
    form: Form

    @property
    def args(self) -> tuple[int, int, int, int, int, int]:
        factors = 0 if self.factors is None else self.factors.data_ptr()
        bias = 0 if self.bias is None else self.bias.data_ptr()
        return self.address, factors, bias, self.out, self.width, int(self.form)


def item_numbers(dtype: torch.dtype) -> int:
    return 4 // dtype.itemsize


def packed_bytes(shape: Shape, dtype: torch.dtype) -> int:
    out, width, form = shape
    if form is Form.PLAIN:
        return _panels(out) * PANEL * _whole_items(width, dtype) * dtype.itemsize
    return _panels(out) * -(-width // GROUP) * group_bytes(form)


def group_bytes(form: Form) -> int:
    scales = PANEL * (4 if form is Form.INT4 else 2)
    return scales + GROUP * PANEL // (2 if form is Form.INT4 else 1)


@dataclass(frozen=True)
class Rows:
    """The rows of a weight, at any addresses; packing rounds them to the model's dtype.

    :param addresses: int64 [out]; 0 is a row of zeros.
    :param parts: the tensors that hold them.
    :param packed_width: numbers of a packed row; those beyond its own are zeros.
    """

    addresses: torch.Tensor
    parts: tuple[torch.Tensor, ...]
    packed_width: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.addresses.shape[0], self.packed_width


def rows_of(
    weights: Sequence[torch.Tensor], join: Callable[[list[torch.Tensor]], torch.Tensor] = torch.cat
) -> Rows:
    """Join the rows of weights [n, width] of one dtype and width.

    :raises ValueError: if dtypes or widths differ.
    """
    parts = [weight.detach().contiguous() for weight in weights]
    width = parts[0].shape[1]
    if any(part.shape[1] != width or part.dtype != parts[0].dtype for part in parts):
        raise ValueError("weights that are packed together need one width and one dtype")
    places = [
        part.data_ptr() + torch.arange(part.shape[0]) * width * part.itemsize for part in parts
    ]
    return Rows(join(places), tuple(parts), width)


def packed_groups(weight: GroupedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Pack an int8 or int4 weight for a model of a dtype: uint8 [panels, groups, bytes of one]."""
    out, width = weight.shape
    rows = -out % PANEL
    numbers = item_numbers(dtype)
    quants = torch.nn.functional.pad(weight.quants, (0, -width % GROUP, 0, rows))
    steps = quants.view(_panels(out), PANEL, -1, GROUP // numbers, numbers)
    items = steps.permute(0, 2, 3, 1, 4)  # [panels, groups, steps, 32, numbers]
    made = items.contiguous().view(torch.uint8) if weight.minima is None else _words(items)
    parts = [weight.scales] if weight.minima is None else [weight.scales, weight.minima]
    scales = [_by_group(torch.nn.functional.pad(part, (0, 0, 0, rows))) for part in parts]
    return torch.cat([*scales, made.flatten(2)], -1)


def _by_group(values: torch.Tensor) -> torch.Tensor:
    """Convert float16 [rows, groups] → its bytes [panels, groups, 64]."""
    return values.view(-1, PANEL, values.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)


def _words(items: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit numbers [panels, groups, steps, 32, numbers] into bytes, two per four steps."""
    panels, groups, _, lanes, numbers = items.shape
    halves = STEPS_OF_A_WORD // 2
    pairs = items.reshape(panels, groups, -1, halves, 2, lanes, numbers)
    made = pairs[:, :, :, :, 0] | pairs[:, :, :, :, 1] << 4
    return made.permute(0, 1, 2, 4, 5, 3).contiguous()


def interleave_gates(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Interleave rows of two weights [n, …] by 16: each panel has 16 gates, then their 16 ups.

    n is padded with zeros to a multiple of 16.
    """
    half = PANEL // 2
    missing = -gate.shape[0] % half
    pads = (0, 0) * (gate.dim() - 1) + (0, missing)
    padded = (torch.nn.functional.pad(rows, pads) for rows in (gate, up))
    pair = [rows.view(-1, half, *rows.shape[1:]) for rows in padded]
    return torch.cat(pair, 1).flatten(0, 1)


class WeightStore:
    """Memory for packed weights.

    :ivar is_filled: another process packed them there; they can only be found.
    """

    def __init__(
        self, size_bytes: int, memory: WeightMemory | None = None, what: str = "packed"
    ) -> None:
        """Take memory for ``size_bytes``.

        :param memory: this process's own, in huge pages if the system has any, if not given.
        """
        piece = (memory or PrivateWeights()).take(what, size_bytes)
        self.is_filled = piece.is_filled
        self._bytes = torch.frombuffer(piece.memory, dtype=torch.uint8)[: max(size_bytes, 1)]
        self._used = 0

    @property
    def used_bytes(self) -> int:
        return self._used

    def add(
        self,
        weight: Rows | GroupedWeight,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        factors: torch.Tensor | None = None,
        num_threads: int = 1,
    ) -> PackedMatrix:
        """Pack a weight [out, width] after the others.

        :param factors: multiply its sums before the bias; [out], like the bias.
        :raises ValueError: if the store has no room for it.
        """
        form = weight.form if isinstance(weight, GroupedWeight) else Form.PLAIN
        shape = (*weight.shape, form)
        place = self._place(packed_bytes(shape, dtype))
        if isinstance(weight, GroupedWeight):
            made = packed_groups(weight, dtype)
            place.view(made.shape).copy_(made)
        else:
            _pack(weight, place, dtype, num_threads)
        return _matrix(place, shape, bias, dtype, factors)

    def find(
        self,
        shape: Shape,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        factors: torch.Tensor | None = None,
    ) -> PackedMatrix:
        place = self._place(packed_bytes(shape, dtype))
        return _matrix(place, shape, bias, dtype, factors)

    def _place(self, size_bytes: int) -> torch.Tensor:
        if self._used + size_bytes > self._bytes.numel():
            raise ValueError(f"{size_bytes} bytes more than the store's {self._bytes.numel()}")
        place = self._bytes[self._used : self._used + size_bytes]
        self._used += -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
        return place


def _matrix(
    place: torch.Tensor,
    shape: Shape,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    factors: torch.Tensor | None,
) -> PackedMatrix:
    out, width, form = shape
    columns = (_by_column(factors, out), _by_column(bias, out))
    return PackedMatrix(place.data_ptr(), *columns, out, _whole_items(width, dtype), form)


def _pack(rows: Rows, place: torch.Tensor, dtype: torch.dtype, num_threads: int) -> None:
    """Pack into panels: [panels, items, 32, numbers of an item] of the dtype."""
    from kvell.models.fused import _packing

    addresses = rows.addresses.contiguous()
    part = rows.parts[0]
    _packing.pack_rows(
        addresses.data_ptr(),
        addresses.shape[0],
        part.shape[1],
        _whole_items(rows.packed_width, dtype) // item_numbers(dtype),
        _ELEMENTS.index(part.dtype),
        _ELEMENTS.index(dtype),
        place.data_ptr(),
        num_threads,
    )


def store_bytes(shapes: list[Shape], dtype: torch.dtype) -> int:
    sizes = (packed_bytes(shape, dtype) for shape in shapes)
    return sum(-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes)


def _by_column(values: torch.Tensor | None, out: int) -> torch.Tensor | None:
    if values is None:
        return None
    return torch.nn.functional.pad(values.detach().float(), (0, -out % PANEL)).contiguous()


def _panels(out: int) -> int:
    return -(-out // PANEL)


def _whole_items(width: int, dtype: torch.dtype) -> int:
    numbers = item_numbers(dtype)
    return -(-width // numbers) * numbers
