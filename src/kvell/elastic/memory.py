"""Executor of the balloon's plans: device and memory core change, then the balloon settles.

::

    grant ─► plan ─► core.withhold ─► device.map ─► settle ─► a slot
                          ▲                │ refused
                          └─── restore ◄───┘               the ledger is unchanged
    release ─► idle, still mapped ─► (inflate) immediately KV's, unmapped when unreachable

A failure leaves owners unchanged. Only the cached content of withheld pages is lost.

The balloon counts positions from the end of the range. It gives slots the lowest positions and the
highest chunks of the pool; so, from the beginning of the range, chunks and positions rise together,
and most of a slot is mapped with one call.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from kvell.device.chunks import NOT_MAPPED, ChunkDevice
from kvell.elastic.balloon import NOWHERE, Balloon, Deflation, Owner
from kvell.elastic.slots import SlotState
from kvell.elastic.tiling import Tiling
from kvell.errors import TryLater
from kvell.prefix.interface import WITHHELD, Ints, WithholdingCore
from kvell.vocabulary import MIB


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


AHEAD_BYTES = 50 * MIB
"""Most bytes that are inflated one step ahead (eLLM §5.1)."""

POSITIONS_PER_CHUNK = 2
"""Addresses of the activation range, in sizes of the pool: they hold slots and stale positions."""


@dataclass(frozen=True)
class Slot:
    """Memory of one step's activations, contiguous and chunk-aligned.

    :param start: position in the range of its first chunk.
    :param address: of its first byte.
    """

    start: int
    num_chunks: int
    address: int
    size_bytes: int


@dataclass
class BalloonCounts:
    """Counts since the start, in chunks."""

    inflated: int = 0
    deflated: int = 0
    mapped: int = 0
    unmapped: int = 0
    refused: int = 0
    withheld_large: int = 0


class ElasticMemory:
    """One pool of chunks that KV cache and activations share.

    :param committed_chunks: the number of first chunks that get memory immediately; :meth:`warm`
        commits the rest.
    """

    def __init__(
        self,
        device: ChunkDevice,
        kv: WithholdingCore,
        tiling: Tiling,
        committed_chunks: int | None = None,
    ) -> None:
        self.device = device
        self.counts = BalloonCounts()
        self.kv = kv
        committed = tiling.num_chunks if committed_chunks is None else committed_chunks
        device.commit(np.arange(committed, dtype=np.int32))
        positions = POSITIONS_PER_CHUNK * tiling.num_chunks
        self.balloon = Balloon(tiling, positions, committed)
        self.area = device.reserve(positions)
        kv.withhold(np.flatnonzero(self.balloon.withheld).astype(np.int32))

    # ---------------------------------------------------------------- activations

    def grant(self, need_bytes: int, step: int) -> Slot | None:
        """Grant memory for the activations of ``step``, whole or not at all.

        Return None if too little is free or reclaimable, or the device refused.
        """
        count = max(1, -(-need_bytes // self.device.chunk_bytes))
        plan = self.balloon.plan_slot(count, self.kv.reclaim_order)
        if plan is None or not self._carry_out(plan, step):
            self.counts.refused += 1
            return None
        size_bytes = count * self.device.chunk_bytes
        start = self._mirrored(plan.start + count - 1)
        address = self.area.address + start * self.device.chunk_bytes
        return Slot(start, count, address, size_bytes)

    def ensure(self, num_chunks: int) -> int:
        """Let activations own ``num_chunks`` idle chunks, or as many as KV can give.

        Nothing is mapped yet. Return the idle chunks there are now, which may be more.
        """
        idle = self.balloon.idle_chunks
        if idle >= num_chunks:
            return idle
        plan = self.balloon.plan_loose(num_chunks - idle, self.kv.reclaim_order())
        if plan.withheld:
            self.kv.withhold(_ints(plan.withheld))
        self.balloon.settle(plan)
        self.counts.deflated += len(plan.chunks)
        self.counts.withheld_large += len(plan.withheld)
        return idle + len(plan.chunks)

    def release(self, slot: Slot, step: int) -> None:
        """Free a slot; ``step`` was the last to touch its bytes."""
        last = slot.start + slot.num_chunks - 1
        self.balloon.slots.release(self._mirrored(last), slot.num_chunks, step)

    def _mirrored(self, position: int) -> int:
        return self.area.num_positions - 1 - position

    def _carry_out(self, plan: Deflation, step: int) -> bool:
        if plan.maps and not self._map(plan):
            return False
        self.balloon.settle(plan, step)
        self.counts.mapped += len(plan.maps)
        self.counts.deflated += len(plan.chunks)
        self.counts.withheld_large += len(plan.withheld)
        return True

    def _map(self, plan: Deflation) -> bool:
        if plan.withheld:
            self.kv.withhold(_ints(plan.withheld))
        try:
            pairs = sorted((self._mirrored(position), chunk) for position, chunk in plan.maps)
            positions, chunks = _ints(p for p, _ in pairs), _ints(c for _, c in pairs)
            self.device.map(self.area, positions, chunks)
        except TryLater:
            if plan.withheld:
                self.kv.restore(_ints(plan.withheld))
            return False
        return True

    # ------------------------------------------------------------------------- KV

    def inflate(self, num_large: int, keep_bytes: int = 0) -> int:
        """Give KV up to ``num_large`` more empty large pages, from idle activations.

        :param keep_bytes: of idle activations that stay.
        :returns: the number of new large pages; they are empty, and cached pages stay.
        """
        keep_chunks = -(-keep_bytes // self.device.chunk_bytes)
        plan = self.balloon.plan_inflation(num_large, keep_chunks)
        if plan.chunks:
            self.balloon.settle(plan)
            self.kv.restore(_ints(plan.restored))
            self.counts.inflated += len(plan.chunks)
        return len(plan.restored)

    # ------------------------------------------------------------------ in between

    def tend(self, completed_step: int) -> int:
        """Unmap the positions that no step after ``completed_step`` can touch; return how many.

        A refusal of the device is tried again the next time.
        """
        due = sorted(self.balloon.slots.due(completed_step), reverse=True)
        if not due:
            return 0
        done = self.device.unmap(self.area, _ints(map(self._mirrored, due)))
        self.balloon.on_unmapped(due[:done])
        self.counts.unmapped += done
        return done

    def warm(self, count: int) -> int:
        """Give the next ``count`` chunks memory and give them to KV; return how many.

        :raises TryLater: if there is no more memory; earlier chunks keep theirs.
        """
        chunks = self.balloon.uncommitted_chunks[:count]
        try:
            self.device.commit(_ints(chunks))
        finally:
            done = [chunk for chunk in chunks if self.device.home.table[chunk] == chunk]
            plan = self.balloon.plan_commit(done)
            self.balloon.settle(plan)
            if plan.restored:
                self.kv.restore(_ints(plan.restored))
        return len(done)

    def figures(self) -> dict[str, int]:
        """Return chunks by owner and state (``…_chunks``), and the counts so far."""
        balloon = self.balloon
        return {
            "chunk_bytes": self.device.chunk_bytes,
            "kv_chunks": int(np.count_nonzero(balloon.owner == Owner.KV)),
            "activation_idle_chunks": balloon.idle_chunks,
            "activation_used_chunks": balloon.slots.count(SlotState.USED),
            "cold_chunks": int(np.count_nonzero(balloon.owner == Owner.SYSTEM)),
            "stale_positions": balloon.slots.count(SlotState.STALE),
            "withheld_large_pages": int(np.count_nonzero(balloon.withheld)),
            **asdict(self.counts),
        }

    def audit(self) -> list[str]:
        withheld = np.flatnonzero(self.kv.reclaim_order() == WITHHELD).tolist()
        return audit_balloon(self.balloon, self.area.table[::-1], withheld)


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int32)
