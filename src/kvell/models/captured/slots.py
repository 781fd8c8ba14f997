"""The memory of a recorded step's inputs: one range on the device, and its copies on the host.

::

    a slot:  [ids, seats, positions, lengths, write places │ attention's work │ page ids of all]
             └──────────── fixed by the size ────────────┘ └─────── as many as used ──────────┘

The host fills a slot, whose used parts are copied to the device.  The next step fills another slot,
while the device may still read this one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from kvell.attention.host_batch import HostRows
from kvell.attention.triton.filling import fill_items
from kvell.attention.triton.held import Capacity
from kvell.attention.triton.work import MOST_DOUBLINGS, MOST_SECTIONS, Lengths, Tiling
from kvell.pages.layout import GroupKind, GroupSpec

Ints = npt.NDArray[np.int32]

ALIGNED = 4
"""Numbers of 16 bytes, at whose multiples a kernel's work begins."""
NO_PAGE = -1
"""The page of a pad's key and value, which are not written."""
NO_SEAT = -1


class SlotFullError(Exception):
    """A slot is too small for a step."""


@dataclass(frozen=True)
class WorkPlace:
    """The place of an attention group's work, by the tiling of some of its layers."""

    tiling: Tiling
    capacity: Capacity
    numbers: slice


@dataclass(frozen=True)
class GroupPlaces:
    """The places of an attention group's numbers in a slot; the names are those of GroupBatch.

    :param works: for kernels that read their work from memory.
    """

    table_starts: slice
    context_lens: slice
    first_positions: slice
    write_page_ids: slice
    write_offsets: slice
    works: tuple[WorkPlace, ...] = ()


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
    :param fixed: the part of a slot whose length does not depend on the step.
    :param page_ids: the page ids of all attention groups, one group after the other.
    """

    rows: int
    literals: slice
    sources: slice
    targets: slice
    positions: slice
    groups: tuple[GroupPlaces | StatePlaces | None, ...]
    fixed: slice
    page_ids: slice

    @property
    def size(self) -> int:
        return int(self.page_ids.stop)


@dataclass(frozen=True)
class SlotLimits:
    """The limits of steps that slots hold.

    :param pool_tokens: the most tokens of all requests together, unless they share pages.
    """

    rows: int
    page_ids: int
    context_tokens: int
    pool_tokens: int

    def items(self, tiling: Tiling, rows: int) -> int:
        tokens = self.context_tokens
        if tiling.window_tokens:
            tokens = min(tokens, tiling.window_tokens)
        longest = -(-tokens // (tiling.section_tokens << MOST_DOUBLINGS))
        most = min(max(longest, MOST_SECTIONS), -(-tokens // tiling.section_tokens)) + 2
        return min(rows * most, self.pool_tokens // tiling.section_tokens + 3 * rows)


def places_of(
    rows: int,
    groups: Sequence[GroupSpec | None],
    spares: Sequence[int],
    limits: SlotLimits,
    tilings: Sequence[Sequence[Tiling]] = (),
) -> Places:
    """Return the places of a bucket's numbers.

    :param groups: the model's groups, in its order; None for one without text tokens.
    :param spares: by group, the page that pads of a state group use.
    :param tilings: by group, those of kernels that read their work from memory.
    """
    end = 0

    def take(count: int) -> slice:
        nonlocal end
        begin = end
        end += count
        return slice(begin, end)

    def work(tiling: Tiling) -> WorkPlace:
        capacity = Capacity(limits.items(tiling, rows), rows, 1)
        take(-end % ALIGNED)
        return WorkPlace(tiling, capacity, take(capacity.num_ints))

    own = (take(rows), take(rows), take(rows), take(rows))
    made: list[GroupPlaces | StatePlaces | None] = []
    for group, spare in zip(groups, spares, strict=True):
        if group is None:
            made.append(None)
        elif group.kind is GroupKind.STATE:
            made.append(StatePlaces(take(rows * group.slices), group.slices, spare))
        else:
            made.append(GroupPlaces(take(rows + 1), take(rows), take(rows), take(rows), take(rows)))
    fixed = slice(0, end)
    for number, of_group in enumerate(tilings):
        group_places = made[number]
        if isinstance(group_places, GroupPlaces):
            works = tuple(map(work, of_group))
            made[number] = replace(group_places, works=works)
    return Places(rows, *own, tuple(made), fixed, take(limits.page_ids))


@dataclass(frozen=True)
class DecodeRows:
    """A step in which each request computes one token, on the host.

    :param token_ids: the tokens that the host knows; any number for other requests.
    :param sources: seat whose last token is computed; NO_SEAT for ``token_ids``.
    :param targets: seat that keeps the token that is drawn; NO_SEAT if none does.
    :param groups: the fields of GroupBatch for attention, those of HostStateBatch for states.
    """

    token_ids: npt.NDArray[np.integer]
    positions: npt.NDArray[np.integer]
    groups: Sequence[HostRows | None]
    sources: Ints | None = None
    targets: Ints | None = None

    @property
    def num_pages(self) -> int:
        kept = (rows for rows in self.groups if rows is not None)
        return sum(rows.sizes[_PAGE_IDS] for rows in kept if len(rows.sizes) > _OF_STATES)

    @staticmethod
    def none(groups: Sequence[GroupPlaces | StatePlaces | None]) -> "DecodeRows":
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


def fill(slot: Ints, places: Places, step: DecodeRows, no_seat: int) -> list[slice]:
    """Write a step into a slot; return the parts that the device needs.

    A pad has no context, no page to read, and none to write.

    :param no_seat: the seat that stands for NO_SEAT among targets.
    :raises SlotFullError: if there is too little room for attention's work.
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
    works = [
        _fill_work(slot, places.rows, group, work)
        for group in places.groups
        if isinstance(group, GroupPlaces)
        for work in group.works
    ]
    return [places.fixed, *works, slice(places.page_ids.start, used)]


def _fill_work(slot: Ints, rows: int, group: GroupPlaces, work: WorkPlace) -> slice:
    """Cut a group's attention into items; return their place."""
    lengths = Lengths(
        np.arange(rows + 1, dtype=np.int32),
        slot[group.context_lens],
        slot[group.table_starts],
        slot[group.first_positions],
    )
    begin: int = work.numbers.start
    try:
        count = fill_items(lengths, work.tiling, work.capacity, slot[work.numbers])
    except ValueError as error:
        raise SlotFullError from error
    return slice(begin, begin + Capacity(count, 0, 1).num_ints)


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
