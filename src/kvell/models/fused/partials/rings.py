"""Memory that a debtor's pass and a creditor's service share (``csrc/partials/ring.h``).

The caller provides it, so that processes may share it: an ``mmap`` of a memfd, or an array. Zeros
are an empty ring, and a bell that has not rung. Slots are fixed; a full ring refuses immediately.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvell.models.fused import _forward

BELL_BYTES = 64
"""Size of the memory by which all debtors wake one service."""
SLOTS = 16
"""Most queries under way in a ring; a power of two."""
_LINE_BYTES = 64

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class RingMemory:
    """One debtor's ring at one creditor.

    :param memory: uint8 [any number] that begins at a multiple of 64 bytes, zeros at first.
    :param slots: number of slots that it is cut into.
    :raises ValueError: if it is misaligned, or has no room for two slots.
    """

    memory: Bytes
    slots: int = SLOTS

    def __post_init__(self) -> None:
        if _address(self.memory) % _LINE_BYTES:
            raise ValueError(f"memory: begins at no multiple of {_LINE_BYTES} bytes")

    @property
    def args(self) -> tuple[int, int]:
        """Its address and size, in the compiled modules' form."""
        return _address(self.memory), self.memory.nbytes

    def creditor(self, bell: Bytes) -> "_forward.Creditor":
        """Return the debtor's end; only one may be in use, and the memory must outlive it.

        :param bell: uint8 [``BELL_BYTES``] of the creditor.
        """
        from kvell.models.fused import _forward

        return _forward.RingCreditor(self.args, self.slots, _address(bell))


def ring_bytes(slot_bytes: int, slots: int = SLOTS) -> int:
    """Return the bytes of a ring with slots of ``slot_bytes``, heads included."""
    from kvell.models.fused import _forward

    return _forward.ring_bytes(slots, slot_bytes)


def aligned_zeros(size_bytes: int) -> Bytes:
    """Return memory of this process alone, for rings and bells within it."""
    memory = np.zeros(size_bytes + _LINE_BYTES, np.uint8)
    start = -_address(memory) % _LINE_BYTES
    return memory[start : start + size_bytes]


def _address(memory: Bytes) -> int:
    address: int = memory.__array_interface__["data"][0]
    return address
