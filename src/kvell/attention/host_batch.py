"""A step's metadata in one array in host memory, which compiled passes read by its address.

Tensors over the parts are made on first access: a dozen of them takes 0.1 ms between two passes,
when torch's code has left the caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from kvell.attention.interface import GroupBatch
from kvell.attention.states import StateBatch

Whole = npt.NDArray[Any]
_SevenInts = tuple[int, int, int, int, int, int, int]


@dataclass(frozen=True, eq=False)
class HostRows:
    """Consecutive arrays in one buffer.

    :param flat: the buffer: contiguous, int32 or int64.
    """

    flat: Whole
    address: int
    sizes: Sequence[int]

    @classmethod
    def of(cls, arrays: Sequence[Whole], dtype: type[np.int32] | type[np.int64]) -> Self:
        flat = np.concatenate(arrays, dtype=dtype)
        address: int = flat.__array_interface__["data"][0]
        return cls(flat, address, [len(array) for array in arrays])

    @cached_property
    def addresses(self) -> list[int]:
        begins = accumulate(self.sizes[:-1], initial=0)
        return [self.address + self.flat.itemsize * begin for begin in begins]

    @property
    def arrays(self) -> list[Whole]:
        return np.split(self.flat, np.cumsum(self.sizes[:-1]))

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        parts: Sequence[torch.Tensor] = torch.from_numpy(self.flat).split_with_sizes(self.sizes)
        return parts


class OnHost:
    """Fields that are made from ``rows`` on the first access to any of them."""

    MADE: ClassVar[tuple[str, ...]]
    rows: HostRows

    def __init__(self, rows: HostRows) -> None:
        object.__setattr__(self, "rows", rows)

    def __getattr__(self, name: str) -> Any:
        if name not in type(self).MADE:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        for field, part in zip(type(self).MADE, self.make_fields(), strict=True):
            object.__setattr__(self, field, part)
        return getattr(self, name)

    def make_fields(self) -> Sequence[torch.Tensor]:
        return self.rows.tensors


class HostGroupBatch(OnHost, GroupBatch):
    """A group's metadata: the seven fields of :class:`GroupBatch`, in their order."""

    MADE = tuple(field.name for field in fields(GroupBatch) if field.name != "host")

    @property
    def args(self) -> _SevenInts:
        """The number of requests, the addresses of all but the writes, and the number of pages."""
        queries, lengths, tables, pages, firsts, *_ = self.rows.addresses
        _, requests, _, num_pages, *_ = self.rows.sizes
        return requests, queries, lengths, tables, pages, firsts, num_pages

    @property
    def writes(self) -> tuple[int, int]:
        *_, pages, offsets = self.rows.addresses
        return pages, offsets


class HostStateBatch(OnHost, StateBatch):
    """A state group's metadata if all states continue in place and no state is cut.

    Rows are ``query_starts``, ``starts`` and ``page_ids``.
    """

    MADE = tuple(field.name for field in fields(StateBatch) if field.name != "end_page_ids")

    @override
    def make_fields(self) -> Sequence[torch.Tensor]:
        query_starts, starts, page_ids = self.rows.tensors
        pages = page_ids.view(len(starts), -1)
        none = starts[:0]
        return query_starts, starts, pages, none, none, pages[:0]

    @property
    def args(self) -> tuple[tuple[int, int, int], list[int]]:
        """The numbers of requests, cuts and slices; and the addresses of all tables."""
        queries, starts, pages = self.rows.addresses
        _, requests, num_pages = self.rows.sizes
        return (requests, 0, num_pages // max(1, requests)), [queries, starts, *[pages] * 4, 0]
