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

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np

from kvell.device.chunks import ChunkDevice
from kvell.elastic.balloon import Balloon, Deflation, Owner
from kvell.elastic.slots import SlotState
from kvell.elastic.tiling import Tiling
from kvell.errors import TryLater
from kvell.prefix.interface import Ints, WithholdingCore
from kvell.vocabulary import MIB

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
            self.kv.withhold(ints_of(plan.withheld))
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
            self.kv.withhold(ints_of(plan.withheld))
        try:
            pairs = sorted((self._mirrored(position), chunk) for position, chunk in plan.maps)
            positions, chunks = ints_of(p for p, _ in pairs), ints_of(c for _, c in pairs)
            self.device.map(self.area, positions, chunks)
        except TryLater:
            if plan.withheld:
                self.kv.restore(ints_of(plan.withheld))
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
            self.kv.restore(ints_of(plan.restored))
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
        done = self.device.unmap(self.area, ints_of(map(self._mirrored, due)))
        self.balloon.on_unmapped(due[:done])
        self.counts.unmapped += done
        return done

    def warm(self, count: int) -> int:
        """Give the next ``count`` chunks memory and give them to KV; return how many.

        :raises TryLater: if there is no more memory; earlier chunks keep theirs.
        """
        chunks = self.balloon.uncommitted_chunks[:count]
        try:
            self.device.commit(ints_of(chunks))
        finally:
            done = [chunk for chunk in chunks if self.device.home.table[chunk] == chunk]
            plan = self.balloon.plan_commit(done)
            self.balloon.settle(plan)
            if plan.restored:
                self.kv.restore(ints_of(plan.restored))
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


def ints_of(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int32)
