"""GGUF's blocks in the forms of the compiled kernels.

A form keeps half-precision scales for each 32 numbers of a row (``fused/grouped``). Blocks that
have just that are taken as they are; all others are unpacked a few rows at a time and quantised::

    Q4_0 Q4_1  32 × 4 bits, scale (and minimum)             → int4, exact
    Q4_K       8 × 32 × 4 bits, 6-bit scales and minima     → int4; a scale is rounded to half
    Q8_0       32 × 8 bits, scale                           → int8, exact
    others     of up to 6 bits                              → int8, by their numbers

Sources: ggml's formats; the library ``gguf`` unpacks what is quantised.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from kvell.models.fused.grouped import GROUP, MOST_EIGHT, BlockWeight, Form, GroupedWeight
from kvell.models.gguf.gguf_tensors import FOUR_BITS, Bytes

Order = npt.NDArray[np.int64]

PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
HALF_BYTES = 2


def row_blocks(rows: Bytes, kind: str, order: Order | None = None) -> BlockWeight:
    """Return a weight from its rows of bytes, which are read when it is packed.

    :param rows: uint8 [out, bytes of a row's blocks].
    :param kind: one of ``FOUR_BITS`` and ``EIGHT_BITS``.
    :param order: the place in ``rows`` of each row of the weight; None for the same.
    """
    import gguf

    quantised = gguf.GGMLQuantizationType[kind]
    numbers, size_bytes = gguf.GGML_QUANT_SIZES[quantised]
    shape = rows.shape[0], rows.shape[1] // size_bytes * numbers
    form = Form.INT4 if kind in FOUR_BITS else Form.INT8
    read = _READERS.get(kind)

    def taken(start: int, stop: int) -> Bytes:
        return rows[start:stop] if order is None else rows[order[start:stop]]

    def numbers_of(start: int, stop: int) -> torch.Tensor:
        return torch.from_numpy(gguf.dequantize(taken(start, stop), quantised))

    own = None if read is None else lambda: read(taken(0, shape[0]))
    return BlockWeight(kind, form, shape, numbers_of, own)


def _read_q4_0(rows: Bytes) -> GroupedWeight:
    scales, quants = _halves(rows, 1, GROUP // 2)
    return GroupedWeight(_nibbles(quants), scales[0], (-8 * scales[0].float()).half())


def _read_q4_1(rows: Bytes) -> GroupedWeight:
    (scales, minima), quants = _halves(rows, 2, GROUP // 2)
    return GroupedWeight(_nibbles(quants), scales, minima)


def _read_q8_0(rows: Bytes) -> GroupedWeight | None:
    """Read 8-bit numbers; None if one is -128, of which kernels cannot take the magnitude."""
    scales, quants = _halves(rows, 1, GROUP)
    numbers = quants.view(torch.int8).flatten(1)
    return None if int(numbers.min()) < -MOST_EIGHT else GroupedWeight(numbers, scales[0], None)


def _read_q4_k(rows: Bytes) -> GroupedWeight:
    """Read blocks of 8 groups: two half-precision factors, 12 bytes of 6-bit scales, 4-bit numbers.

    The first four scales and minima are the low bits of bytes 0 to 3 and 4 to 7. The others have
    four bits in bytes 8 to 11 and two in the high bits of those.
    """
    (factors, minimum_factors), rest = _halves(rows, 2, 12 + 4 * GROUP)
    bits = rest[..., :12].view(*rest.shape[:2], 3, 4).int()
    low, high, both = bits.unbind(-2)
    scales = torch.cat([low & 63, both & 15 | (low >> 6) << 4], -1)
    minima = torch.cat([high & 63, both >> 4 | (high >> 6) << 4], -1)
    quants = rest[..., 12:].reshape(rows.shape[0], -1, GROUP)
    return GroupedWeight(
        _nibbles(quants),
        (factors.float()[..., None] * scales).half().flatten(1),
        (-minimum_factors.float()[..., None] * minima).half().flatten(1),
    )


def _halves(rows: Bytes, count: int, rest_bytes: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Split blocks into half-precision numbers [out, blocks] and their other bytes."""
    start = count * HALF_BYTES
    blocks = torch.from_numpy(rows).view(rows.shape[0], -1, start + rest_bytes)
    halves = blocks[..., :start].contiguous().view(torch.float16)
    return list(halves.unbind(-1)), blocks[..., start:].contiguous()


def _nibbles(quants: torch.Tensor) -> torch.Tensor:
    """Unpack bytes [out, pieces, n]: n low halves of a piece are followed by its n high halves."""
    return torch.cat([quants & 15, quants >> 4], -1).flatten(1)


_READERS: Mapping[str, Callable[[Bytes], GroupedWeight | None]] = {
    "Q4_0": _read_q4_0,
    "Q4_1": _read_q4_1,
    "Q8_0": _read_q8_0,
    "Q4_K": _read_q4_k,
}
