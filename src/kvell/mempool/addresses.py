"""Where a page is in the whole pool, and for how long that holds."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvell.mempool.owners import Owner, Tick

Medium = Literal["device", "host"]
"""What a page is in: the pool, or the buffer behind it."""


class Address(NamedTuple):
    """A page of one instance.

    :param group: index of its layer group, ``position`` which page of the text it is.
    :param page: its number in the group, ``offset`` where it begins in its medium, in bytes.
    """

    instance: str
    incarnation: int
    group: int
    position: int
    page: int
    offset: int
    medium: Medium = "device"


@dataclass(frozen=True)
class Lease:
    """Pages that are held until a deadline.

    :param deadline: in ticks of the instance.
    :param hit_tokens: of the text that was matched; 0 for memory that was asked for.
    """

    owner: Owner
    deadline: Tick
    addresses: tuple[Address, ...]
    hit_tokens: int = 0
