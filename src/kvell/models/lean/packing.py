"""Weights as the compiled pass streams them (csrc/forward/matrix.h).

Panels of 32 outputs; inside a panel, item by item of the input, the 32 outputs side by side.
An item is 32 bits: a float32, or two neighbouring bfloat16.  All matrices of a model lie one
behind the other in the order of their use, in huge pages where the system gives them.
"""

import mmap
from dataclasses import dataclass

import torch

PANEL = 32
ALIGN_BYTES = 128


@dataclass(frozen=True)
class PackedMatrix:
    """Where a weight lies, and its float32 bias [outputs, padded to panels], if it has one.

    :param out: outputs that mean anything; those of the last panel beyond it are zero.
    """

    address: int
    bias: torch.Tensor | None
    out: int
    width: int

    @property
    def args(self) -> tuple[int, int, int, int]:
        """As the compiled module takes it."""
        return self.address, 0 if self.bias is None else self.bias.data_ptr(), self.out, self.width


def item_numbers(dtype: torch.dtype) -> int:
    """Numbers of a dtype in one item."""
    return 4 // dtype.itemsize


def packed_bytes(out: int, width: int, dtype: torch.dtype) -> int:
    """What a weight [out, width] takes."""
    return -(-out // PANEL) * PANEL * _whole_items(width, dtype) * dtype.itemsize


def packed(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, width] by panels: [panels, items, 32, numbers of an item]."""
    numbers = item_numbers(weight.dtype)
    rows = -(-weight.shape[0] // PANEL) * PANEL
    width = _whole_items(weight.shape[1], weight.dtype)
    padded = torch.nn.functional.pad(
        weight, (0, width - weight.shape[1], 0, rows - weight.shape[0])
    )
    panels = padded.view(rows // PANEL, PANEL, width // numbers, numbers)
    return panels.transpose(1, 2).contiguous()


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows of two weights [n, …] in turns of 16: each panel has 16 gates, then their 16 ups.

    n is padded with zeros to a multiple of 16.
    """
    half = PANEL // 2
    missing = -gate.shape[0] % half
    pads = (0, 0) * (gate.dim() - 1) + (0, missing)
    padded = (torch.nn.functional.pad(one, pads) for one in (gate, up))
    pair = [one.view(-1, half, *one.shape[1:]) for one in padded]
    return torch.cat(pair, 1).flatten(0, 1)


class WeightStore:
    """Anonymous memory for packed weights, in huge pages if the system has any."""

    def __init__(self, size_bytes: int) -> None:
        self._map = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._used = 0

    @property
    def used_bytes(self) -> int:
        """Of all matrices so far."""
        return self._used

    def add(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedMatrix:
        """Pack a weight [out, width] behind the others.

        :raises ValueError: if it does not fit.
        """
        out, width = weight.shape
        size = packed_bytes(out, width, weight.dtype)
        if self._used + size > self._bytes.numel():
            raise ValueError(f"{size} bytes more than the store's {self._bytes.numel()}")
        place = self._bytes[self._used : self._used + size]
        made = packed(weight)
        place.view(weight.dtype).view(made.shape).copy_(made)
        self._used += -(-size // ALIGN_BYTES) * ALIGN_BYTES
        if bias is not None:
            bias = torch.nn.functional.pad(bias.detach().float(), (0, -out % PANEL)).contiguous()
        width = _whole_items(width, weight.dtype)
        return PackedMatrix(place.data_ptr(), bias, out, width)


def store_bytes(shapes: list[tuple[int, int]], dtype: torch.dtype) -> int:
    """A store for weights of these shapes."""
    sizes = (packed_bytes(out, width, dtype) for out, width in shapes)
    return sum(-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes)


def _whole_items(width: int, dtype: torch.dtype) -> int:
    numbers = item_numbers(dtype)
    return -(-width // numbers) * numbers
