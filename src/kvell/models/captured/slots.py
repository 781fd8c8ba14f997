"""The memory of a recorded step's inputs: one range on the device, and its copies on the host.

::

    a slot:  [ids, seats, positions │ lengths and write places, group by group │ page ids of all]
             └─────────────── fixed by the size of the bucket ───────────────┘ └─ as many as used

The host fills a slot, whose used part one copy brings to the device.  The next step fills another
slot, while the device may still read this one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvell.attention.host_batch import HostRows
from kvell.pages.layout import GroupKind, GroupSpec

Ints = npt.NDArray[np.int32]

NO_PAGE = -1
"""The page of a pad's key and value, which are not written."""
NO_SEAT = -1


@dataclass(frozen=True)
class GroupPlaces:
    """The places of an attention group's numbers in a slot; the names are those of GroupBatch."""

    table_starts: slice
    context_lens: slice
    first_positions: slice
    write_page_ids: slice
    write_offsets: slice


@dataclass(frozen=True)
class StatePlaces:
    """The place of a state group's pages in a slot.

    :param slices: pages of a state.
    :param spare: page that pads read and write.
    """

    page_ids: slice
    slices: int
    spare: int


@dataclass(frozen=True)
class Places:
    """The places of all numbers in a slot of a bucket.

    :param rows: the size of the bucket.
    :param page_ids: of all attention groups, one after the other.
    """

    rows: int
    literals: slice
    sources: slice
    targets: slice
    positions: slice
    groups: tuple[GroupPlaces | StatePlaces | None, ...]
    page_ids: slice

    @property
    def size(self) -> int:
        """The number of numbers."""
        return int(self.page_ids.stop)


def places_of(
    rows: int, groups: Sequence[GroupSpec | None], spares: Sequence[int], most_pages: int
) -> Places:
    """Return the places of a bucket's numbers.

    :param groups: of the model, in its order; None for one without text tokens.
    :param spares: by group, the page that pads of a state group use.
    :param most_pages: page ids of all groups together.
    """
    end = 0

    def take(count: int) -> slice:
        nonlocal end
        begin, end = end, end + count
        return slice(begin, end)

    own = (take(rows), take(rows), take(rows), take(rows))
    made: list[GroupPlaces | StatePlaces | None] = []
    for group, spare in zip(groups, spares, strict=True):
        if group is None:
            made.append(None)
        elif group.kind is GroupKind.STATE:
            made.append(StatePlaces(take(rows * group.slices), group.slices, spare))
        else:
            made.append(GroupPlaces(take(rows + 1), *(take(rows) for _ in range(4))))
    return Places(rows, *own, tuple(made), take(most_pages))


@dataclass(frozen=True)
class DecodeRows:
    """A step in which each request computes one token, on the host.

    :param token_ids: of requests whose token the host knows; any number for others.
    :param positions: of the tokens.
    :param sources: seat whose last token is computed; NO_SEAT for ``token_ids``.
    :param targets: seat that keeps the token that is drawn; NO_SEAT if none does.
    :param groups: of attention the fields of GroupBatch, of states those of HostStateBatch.
    """

    token_ids: npt.NDArray[np.integer]
    positions: npt.NDArray[np.integer]
    groups: Sequence[HostRows | None]
    sources: Ints | None = None
    targets: Ints | None = None

    @property
    def num_pages(self) -> int:
        """The number of page ids of all attention groups."""
        kept = (rows for rows in self.groups if rows is not None)
        return sum(rows.sizes[_PAGE_IDS] for rows in kept if len(rows.sizes) > _OF_STATES)

    @staticmethod
    def none(groups: Sequence[GroupPlaces | StatePlaces | None]) -> "DecodeRows":
        """Return a step without a request, for these groups."""
        ids = np.zeros(0, np.int32)
        starts = np.zeros(1, np.int32)
        rows = {
            GroupPlaces: HostRows.of([starts, ids, starts, ids, ids, ids, ids], np.int32),
            StatePlaces: HostRows.of([starts, ids, ids], np.int32),
        }
        return DecodeRows(ids, ids, [rows.get(type(group)) for group in groups])


_OF_STATES = 3
"""Number of a state group's fields."""
_PAGE_IDS = 3
"""Place of the page ids among the fields of GroupBatch."""


def fill(slot: Ints, places: Places, step: DecodeRows, no_seat: int) -> int:
    """Write a step into a slot; return how many of its numbers are used.

    A pad has no context, no page to read, and none to write.

    :param no_seat: the seat that stands for NO_SEAT among targets.
    """
    count = len(step.token_ids)
    _put(slot[places.literals], step.token_ids, 0)
    _put(slot[places.positions], step.positions, 0)
    _put(slot[places.sources], () if step.sources is None else step.sources, NO_SEAT)
    targets = slot[places.targets]
    _put(targets, () if step.targets is None else step.targets, NO_SEAT)
    targets[targets == NO_SEAT] = no_seat
    used: int = places.page_ids.start
    for group, rows in zip(places.groups, step.groups, strict=True):
        if isinstance(group, StatePlaces) and rows is not None:
            _put(slot[group.page_ids], rows.arrays[2], group.spare)
        elif isinstance(group, GroupPlaces) and rows is not None:
            used = _fill_group(slot, group, rows.arrays, count, used, places.page_ids.start)
    return used


def _fill_group(
    slot: Ints, group: GroupPlaces, arrays: Sequence[npt.NDArray[np.int32]], count: int,
    used: int, first: int,
) -> int:  # fmt: skip
    (_, context_lens, table_starts, page_ids, first_positions, write_page_ids, offsets) = arrays
    end = used + len(page_ids)
    slot[used:end] = page_ids
    starts = slot[group.table_starts]
    starts[: count + 1] = table_starts + (used - first)
    starts[count + 1 :] = end - first
    _put(slot[group.context_lens], context_lens, 0)
    _put(slot[group.first_positions], first_positions, 0)
    _put(slot[group.write_page_ids], write_page_ids, NO_PAGE)
    _put(slot[group.write_offsets], offsets, 0)
    return end


def _put(part: Ints, values: Sequence[int] | npt.NDArray[np.integer], pad: int) -> None:
    part[: len(values)] = values
    part[len(values) :] = pad


def spare_pages(
    groups: Sequence[GroupSpec | None], pool: torch.Tensor, pool_bytes: int
) -> list[int]:
    """Return for each state group the first page behind the pool; NO_PAGE for other groups.

    :param pool: the pool's memory, uint8, with room for a page of each group behind it.
    :raises ValueError: if it has no such room.
    """
    spares = []
    for group in groups:
        if group is None or group.kind is not GroupKind.STATE:
            spares.append(NO_PAGE)
            continue
        spare = -(-pool_bytes // group.page_stride_bytes)
        if (spare + 1) * group.page_stride_bytes > pool.numel():
            raise ValueError(f"group {group.name!r}: no page is left behind the pool for pads")
        spares.append(spare)
    return spares
