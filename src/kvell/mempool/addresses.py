"""Addresses of pages in the whole pool, and leases on them."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvell.mempool.owners import Owner, Tick

Medium = Literal["device", "host"]
"""The medium of a page: the pool, or the host buffer of a library."""


class Address(NamedTuple):
    """The address of a page of one instance.

    :param group: the index of its layer group; ``position`` is its index in the text.
    :param page: its number in the group; ``offset`` is its start in its medium, in bytes.
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
    :param hit_tokens: the matched tokens of a text; 0 for allocated memory.
    """

    owner: Owner
    deadline: Tick
    addresses: tuple[Address, ...]
    hit_tokens: int = 0
