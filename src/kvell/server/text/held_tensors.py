"""The memory of pictures' tensors that requests in flight hold."""

from collections.abc import Iterable
from itertools import count
from weakref import WeakValueDictionary

from kvell.engine.protocol.request_spec import SentTensor
from kvell.errors import TryLater
from kvell.vocabulary import MIB

MOST_HELD_BYTES = 512 * MIB
"""At this sum, no further picture is read; the last picture may exceed it."""


class HeldTensors:
    """A count of tensors by weak references: a tensor counts while a request holds it."""

    def __init__(self) -> None:
        self._tensors: WeakValueDictionary[int, SentTensor] = WeakValueDictionary()
        self._numbers = count()

    @property
    def held_bytes(self) -> int:
        """The bytes of all tensors that are alive."""
        return sum(len(tensor.data) for tensor in list(self._tensors.values()))

    def check(self) -> None:
        """Check that there is room for the tensors of another request.

        :raises TryLater: until some request with pictures has ended.
        """
        held_bytes = self.held_bytes
        if held_bytes >= MOST_HELD_BYTES:
            problem = f"requests in flight have {held_bytes} bytes of pictures; retry later"
            raise TryLater(problem, bound="image_pixels")

    def hold(self, tensors: Iterable[SentTensor]) -> None:
        """Count tensors from now on."""
        for tensor in tensors:
            self._tensors[next(self._numbers)] = tensor
