"""Tensors in the format that is sent to an instance: bytes with a name, a type and a shape."""

from math import prod

from msgspec import Struct

from kvell.errors import ChangeSomething

SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
"""Bytes of a number, by the types that may be sent."""
MOST_DIMENSIONS = 8


class SentTensor(Struct, frozen=True, forbid_unknown_fields=True, weakref=True):
    """One tensor of a model's image processor.

    :param dtype: torch's name of the type, one of ``SIZES``.
    :param data: its numbers, row by row, in little-endian order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def check(self) -> None:
        """Check that the data fit type and shape.

        :raises ChangeSomething: naming the tensor.
        """
        size = SIZES.get(self.dtype)
        fits = len(self.shape) <= MOST_DIMENSIONS and min(self.shape, default=0) >= 0
        if size is None or not fits or prod(self.shape) * size != len(self.data):
            data = f"{self.dtype[:20]} {self.shape[:MOST_DIMENSIONS]} of {len(self.data)} bytes"
            problem = "is not a tensor that can be read"
            raise ChangeSomething(f"images.{self.name[:40]}", data, problem, "send it again")
