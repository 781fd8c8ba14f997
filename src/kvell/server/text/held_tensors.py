"""Tensors of pictures that requests in flight keep, for as long as anybody has them."""

from collections.abc import Iterable
from itertools import count
from weakref import WeakValueDictionary

from kvell.engine.protocol.tensors import SentTensor
from kvell.errors import TryLater
from kvell.vocabulary import MIB

MOST_HELD_BYTES = 512 * MIB
"""With so much held no further picture is read; the last one read may exceed it."""


class HeldTensors:
    """Counts tensors without keeping them: one that nobody else has counts no more."""

    def __init__(self) -> None:
        self._tensors: WeakValueDictionary[int, SentTensor] = WeakValueDictionary()
        self._numbers = count()

    @property
    def held_bytes(self) -> int:
        """Bytes of all that are alive."""
        return sum(len(one.data) for one in list(self._tensors.values()))

    def check(self) -> None:
        """Check that there is room for the tensors of another request.

        :raises TryLater: until some request with pictures has ended.
        """
        held_bytes = self.held_bytes
        if held_bytes >= MOST_HELD_BYTES:
            told = f"requests in flight have {held_bytes} bytes of pictures; try again"
            raise TryLater(told, bound="image_pixels")

    def hold(self, tensors: Iterable[SentTensor]) -> None:
        """Count tensors from now on."""
        for one in tensors:
            self._tensors[next(self._numbers)] = one
