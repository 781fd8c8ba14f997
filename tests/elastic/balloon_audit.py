"""The audit of the balloon: every invariant of the chunks, their positions and large pages."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from kvell.device.chunks import NOT_MAPPED
from kvell.elastic.balloon import NOWHERE, Balloon, Owner
from kvell.elastic.memory import ElasticMemory
from kvell.elastic.slots import SlotState
from kvell.prefix.interface import WITHHELD, Ints


def audit_elastic(memory: ElasticMemory) -> list[str]:
    withheld = np.flatnonzero(memory.kv.reclaim_order() == WITHHELD).tolist()
    return audit_balloon(memory.balloon, memory.area.table[::-1], withheld)


def audit_balloon(balloon: Balloon, table: Ints, withheld: Sequence[int]) -> list[str]:
    """Return all problems; empty if there is none.

    :param table: of the activation range, as the device keeps it.
    """
    return [
        *_segments(balloon),
        *_positions(balloon),
        *_mappings(balloon, table),
        *_larges(balloon, withheld),
    ]


def _segments(balloon: Balloon) -> Iterator[str]:
    at = 0
    last = None
    for segment in balloon.slots.segments:
        if segment.start != at or segment.count <= 0:
            yield f"segments leave a gap or overlap at position {at}"
        free = segment.state if segment.is_free else None
        if free is not None and free is last:
            yield f"free neighbours at position {segment.start} are two segments"
        at, last = segment.end, free
    for state in SlotState:
        counted = sum(s.count for s in balloon.slots.segments if s.state is state)
        if counted != balloon.slots.count(state):
            yield f"{counted} positions are {state.name}, not {balloon.slots.count(state)}"
    if at != balloon.slots.num_positions:
        yield f"segments end at position {at} of {balloon.slots.num_positions}"


def _positions(balloon: Balloon) -> Iterator[str]:
    """Check that a chunk of activations is at most at one live position, one of KV at none."""
    live = [
        int(balloon.chunk_at[position])
        for state in (SlotState.IDLE, SlotState.USED)
        for position in balloon.slots.positions(state)
    ]
    for chunk, count in Counter(live).items():
        if count > 1:
            yield f"chunk {chunk} is at {count} positions in use or idle"
        if chunk == NOWHERE or balloon.owner[chunk] != Owner.ACTIVATION:
            yield f"chunk {chunk} is at a position, yet not of the activations"
    for chunk in np.flatnonzero(balloon.position != NOWHERE).tolist():
        position = int(balloon.position[chunk])
        if balloon.chunk_at[position] != chunk or chunk not in live:
            yield f"chunk {chunk} is not at position {position}, where it should be"
    if balloon.activation_chunks != np.count_nonzero(balloon.owner == Owner.ACTIVATION):
        yield f"activations own other chunks than the {balloon.activation_chunks} in the books"
    if len(live) != np.count_nonzero(balloon.position != NOWHERE):
        yield "positions and chunks count each other differently"


def _mappings(balloon: Balloon, table: Ints) -> Iterator[str]:
    """Check that the device's table equals the balloon's, and that bare positions are unmapped."""
    for position in np.flatnonzero(table != balloon.chunk_at).tolist():
        yield (
            f"position {position}: chunk {table[position]} mapped, "
            f"{balloon.chunk_at[position]} in the books"
        )
    for position in balloon.slots.positions(SlotState.BARE):
        if table[position] != NOT_MAPPED:
            yield f"position {position} is bare, yet mapped"
    for state in (SlotState.IDLE, SlotState.USED, SlotState.STALE):
        for position in balloon.slots.positions(state):
            if table[position] == NOT_MAPPED:
                yield f"position {position} is {state.name}, yet not mapped"


def _larges(balloon: Balloon, withheld: Sequence[int]) -> Iterator[str]:
    """Check that KV has a large page exactly if all chunks under it are KV's."""
    taken = balloon.tiling.withheld(balloon.owner != Owner.KV)
    for large in np.flatnonzero(taken != balloon.withheld).tolist():
        yield f"large page {large}: over a taken chunk {taken[large]}, in the books the opposite"
    for large in set(withheld) ^ set(np.flatnonzero(balloon.withheld).tolist()):
        yield f"large page {large}: the core and the balloon disagree on whose it is"
