"""The memory of pictures' tensors that requests in flight hold."""

from collections.abc import Iterable
from itertools import count
from weakref import WeakValueDictionary

from kvell.engine.protocol.request_spec import SentTensor
from kvell.engine.requests.equal_parts import leaves_parts
from kvell.errors import TryLater
from kvell.vocabulary import MIB

MOST_HELD_BYTES = 512 * MIB
"""At this sum of a tenant, no further picture of it is read; the last picture may exceed it.

All tenants together hold less than twice as much (:func:`.leaves_parts`), and their last pictures.
"""


class HeldTensors:
    """A count of tensors by weak references: a tensor counts while a request holds it."""

    def __init__(self) -> None:
        self._tensors: WeakValueDictionary[tuple[str, int], SentTensor] = WeakValueDictionary()
        self._numbers = count()

    def held_bytes(self) -> dict[str, int]:
        held: dict[str, int] = {}
        for (tenant, _), tensor in list(self._tensors.items()):
            held[tenant] = held.get(tenant, 0) + len(tensor.data)
        return held

    def check(self, tenant: str) -> None:
        """Check that there is room for the tensors of another request.

        :raises TryLater: until some request with pictures has ended.
        """
        held = self.held_bytes()
        if not leaves_parts(held, tenant, 1, MOST_HELD_BYTES):
            held_bytes = held.get(tenant) or sum(held.values())
            problem = f"requests in flight have {held_bytes} bytes of pictures; retry later"
            raise TryLater(problem, bound="image_pixels")

    def hold(self, tenant: str, tensors: Iterable[SentTensor]) -> None:
        for tensor in tensors:
            self._tensors[tenant, next(self._numbers)] = tensor
