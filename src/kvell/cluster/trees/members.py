"""The bits that represent instances, and the sequence numbers of their notices."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

MOST_REMEMBERED = 1024
"""Sets of instances whose names are cached: some megabytes with 1,000 instances."""
FEW = 16
"""Largest set of instances that is resolved faster one by one than all together."""


@dataclass
class Member:
    """An instance.

    :ivar bit: represents the entries of the instance; replaced when these are forgotten.
    :ivar next_sequence: of the next notice.
    :ivar asks_again_seconds: when a whole notice is requested (again), since a notice was missed;
        None: none was missed.
    """

    incarnation: int
    bit: int
    next_sequence: int = 0
    asks_again_seconds: float | None = None


class Members:
    """Instances by their ids and by their bits.

    :ivar live: the bits of all instances.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, Member] = {}
        self.live = 0
        self.dead = 0
        self._names: list[str] = []
        self._free: list[int] = []
        self._remembered: dict[int, Sequence[str]] = {}

    def join(self, instance_id: str, incarnation: int) -> Member:
        assert instance_id not in self.by_id, "it must leave first"
        member = Member(incarnation, self._taken(instance_id))
        self.by_id[instance_id] = member
        return member

    def leave(self, instance_id: str) -> None:
        """Forget an instance and its entries; ignore an unknown one."""
        member = self.by_id.pop(instance_id, None)
        if member is not None:
            self._dies(member.bit)

    def forget(self, instance_id: str) -> Member:
        member = self.by_id[instance_id]
        self._dies(member.bit)
        member.bit = self._taken(instance_id)
        return member

    def free(self, bits: int) -> None:
        assert bits & ~self.dead == 0, "bits in use cannot be freed"
        self.dead &= ~bits
        self._free += places(bits)

    def names(self, bits: int) -> Sequence[str]:
        """Return the ids of instances, in no order."""
        names = self._remembered.get(bits)
        if names is None:
            if len(self._remembered) >= MOST_REMEMBERED:
                self._remembered.clear()
            names = self._remembered[bits] = self._named(bits)
        return names

    def audit(self) -> list[str]:
        """Return inconsistencies, in words."""
        bits = [member.bit for member in self.by_id.values()]
        free = sum(1 << place for place in self._free)
        every = (1 << len(self._names)) - 1
        return [
            problem
            for problem, is_wrong in (
                ("two instances have one bit", sum(bits) != self.live),
                ("a bit is live and dead", self.live & self.dead),
                ("a bit is free and in use", free & (self.live | self.dead)),
                ("a bit is lost", free | self.live | self.dead != every),
                (
                    "a bit has another's name",
                    any(self._named(member.bit) != (name,) for name, member in self.by_id.items()),
                ),
            )
            if is_wrong
        ]

    def _taken(self, instance_id: str) -> int:
        if self._free:
            place = self._free.pop()
            self._names[place] = instance_id
        else:
            place = len(self._names)
            self._names.append(instance_id)
        self.live |= 1 << place
        self._remembered.clear()
        return 1 << place

    def _dies(self, bit: int) -> None:
        self.live ^= bit
        self.dead |= bit

    def _named(self, bits: int) -> Sequence[str]:
        if bits.bit_count() <= FEW:
            return tuple(self._names[place] for place in places(bits))
        digits = np.frombuffer(bits.to_bytes(len(self._names) // 8 + 1, "little"), np.uint8)
        positions = np.flatnonzero(np.unpackbits(digits, bitorder="little"))
        return itemgetter(*positions.tolist())(self._names)  # type: ignore[no-any-return]


def places(bits: int) -> list[int]:
    """Return which bits are set, the lowest first."""
    positions = []
    while bits:
        lowest = bits & -bits
        positions.append(lowest.bit_length() - 1)
        bits ^= lowest
    return positions
