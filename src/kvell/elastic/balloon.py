"""The balloon: the owner of each chunk, KV cache or activations, and its moves (eLLM §4.3).

Every chunk of the pool has one owner. It stays mapped at home in the KV region, whatever its owner;
activations see it at a position of their own range too::

          deflate: the large pages over it are withheld
     KV ────────────────────────────────────────────────► ACTIVATION, loose
      ▲                                                       │ map
      │ inflate: a transfer, no call of the device            ▼
      └──────────────────────────────────────────────── ACTIVATION, at a position
        the position stays mapped, stale, until no step can touch it any more

So inflation is free, and deflation costs one mapping a chunk. Both are returned as plans that
change nothing; the caller carries a plan out and then passes it to :meth:`Balloon.settle`.

Rule that the audit checks: a large page is withheld from KV exactly if it overlaps a chunk that is
not KV's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvell.elastic.slots import SlotSpace, SlotState
from kvell.elastic.tiling import Tiling
from kvell.prefix.groups.capacity import largest
from kvell.prefix.interface import USED, Ints, LongInts

Flags = npt.NDArray[np.bool_]

NOWHERE = -1
"""Mark of a chunk that is at no position of the activation range."""


class Owner(IntEnum):
    """The owner of a chunk; the system until the chunk has memory."""

    KV = 0
    ACTIVATION = 1
    SYSTEM = 2


@dataclass(frozen=True)
class Deflation:
    """A slot for activations, and the moves that it requires.

    :param maps: (position, chunk) to be mapped before the slot is used.
    :param retired: idle positions whose chunks move into the slot.
    :param withheld: large pages that KV loses with them; their cached content is evicted.
    """

    start: int
    count: int
    maps: tuple[tuple[int, int], ...] = ()
    retired: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    withheld: tuple[int, ...] = ()


@dataclass(frozen=True)
class Inflation:
    """Chunks that become KV's.

    :param chunks: of activations, idle until now, or of the system.
    :param restored: large pages that KV has again.
    :param retired: positions that these chunks had; they stay mapped for a while.
    """

    chunks: tuple[int, ...] = ()
    restored: tuple[int, ...] = ()
    retired: tuple[int, ...] = ()


class Balloon:
    """Owners of chunks, and the slots of the activation range."""

    def __init__(
        self, tiling: Tiling, num_positions: int, committed_chunks: int | None = None
    ) -> None:
        """Give all committed chunks to KV.

        :param num_positions: of the activation range; addresses are cheap, so twice the pool leaves
            room next to stale positions.
        :param committed_chunks: the number of first chunks that have memory; None: all.
        """
        self.tiling = tiling
        self.slots = SlotSpace(num_positions)
        self.owner = np.full(tiling.num_chunks, Owner.KV, np.int8)
        self.owner[committed_chunks:] = Owner.KV if committed_chunks is None else Owner.SYSTEM
        self.activation_chunks = 0  # owned by activations
        self.position = np.full(tiling.num_chunks, NOWHERE, np.int32)
        self.withheld = tiling.withheld(self.owner != Owner.KV)
        self.chunk_at = np.full(num_positions, NOWHERE, np.int32)

    @property
    def uncommitted_chunks(self) -> tuple[int, ...]:
        return tuple(np.flatnonzero(self.owner == Owner.SYSTEM).tolist())

    @property
    def idle_chunks(self) -> int:
        return self.activation_chunks - self.slots.count(SlotState.USED)

    # ------------------------------------------------------------------ deflation

    def plan_slot(self, count: int, reclaim_order: Callable[[], LongInts]) -> Deflation | None:
        """Plan a slot of ``count`` ≥ 1 chunks; return None if chunks or addresses do not suffice.

        Idle chunks are used first, and only then chunks of KV: those under empty large pages, then
        those under cached ones, the oldest first, anywhere in the pool.

        :param reclaim_order: called only if KV must give (:meth:`WithholdingCore.reclaim_order`).
        """
        placement = self.slots.find(count)
        if placement is None:
            return None
        missing = placement.missing
        if not missing:
            return Deflation(placement.start, count)
        loose = list(islice(self._loose(), len(missing)))
        want = len(missing) - len(loose)
        retired = tuple(islice(self.slots.oldest_idle(placement), want))
        want -= len(retired)
        given = self._reclaimable(want, reclaim_order()) if want else ()
        if given is None:
            return None
        chunks = [*loose, *self.chunk_at[list(retired)].tolist(), *given]
        maps = tuple(zip(missing, chunks, strict=True))
        withheld = {large for chunk in given for large in self.tiling.larges_over(chunk)}
        return Deflation(
            placement.start,
            count,
            maps,
            retired,
            given,
            tuple(sorted(large for large in withheld if not self.withheld[large])),
        )

    def plan_loose(self, count: int, reclaim_order: LongInts) -> Deflation:
        order = self.tiling.chunk_order(reclaim_order)
        most = int(np.count_nonzero((order < USED) & (self.owner == Owner.KV)))
        given = self._reclaimable(min(count, most), reclaim_order) or ()
        withheld = {large for chunk in given for large in self.tiling.larges_over(chunk)}
        lost = tuple(sorted(large for large in withheld if not self.withheld[large]))
        return Deflation(0, 0, chunks=given, withheld=lost)

    def _reclaimable(self, count: int, reclaim_order: LongInts) -> tuple[int, ...] | None:
        order = self.tiling.chunk_order(reclaim_order)
        order[self.owner != Owner.KV] = USED
        by_cost = np.argsort(order[::-1], kind="stable")[:count]
        chunks = self.tiling.num_chunks - 1 - by_cost
        if len(chunks) < count or (order[chunks] == USED).any():
            return None
        return tuple(chunks.tolist())

    def _loose(self) -> Iterator[int]:
        if self.activation_chunks == self.slots.count(SlotState.USED) + self.slots.count(
            SlotState.IDLE
        ):
            return iter(())
        is_loose = (self.owner == Owner.ACTIVATION) & (self.position == NOWHERE)
        return iter(np.flatnonzero(is_loose).tolist())

    # ------------------------------------------------------------------ inflation

    def plan_inflation(self, num_large: int, keep_chunks: int = 0) -> Inflation:
        """Plan to give KV idle chunks for ``num_large`` more large pages, or as many as possible.

        Chunks that give most large pages per chunk are first, then those at no position, then the
        highest positions: slots are taken from the lowest.

        :param keep_chunks: idle chunks that activations keep at least.
        """
        is_idle = self._idle()
        may_give = int(np.count_nonzero(is_idle)) - keep_chunks
        larges = self._by_cost(is_idle)
        # The more large pages of that order, the more chunks; pages that these complete count too.
        most = largest(len(larges), lambda n: int(self._taken(larges[:n]).sum()) <= may_give)
        enough = largest(most, lambda n: len(self._completed(self._taken(larges[:n]))) < num_large)
        chosen = self._taken(larges[: min(most, enough + 1) if num_large else 0])
        at = self.position[chosen]
        return Inflation(
            tuple(np.flatnonzero(chosen).tolist()),
            tuple(self._completed(chosen).tolist()),
            tuple(at[at != NOWHERE].tolist()),
        )

    def plan_commit(self, chunks: Sequence[int]) -> Inflation:
        chosen = np.zeros(self.tiling.num_chunks, np.bool_)
        chosen[list(chunks)] = True
        return Inflation(tuple(chunks), tuple(self._completed(chosen).tolist()))

    def _idle(self) -> Flags:
        """Return the chunks that activations own and no slot uses [num_chunks]."""
        is_idle: Flags = self.owner == Owner.ACTIVATION
        for segment in self.slots.segments:
            if segment.state is SlotState.USED:
                is_idle[self.chunk_at[segment.start : segment.end]] = False
        return is_idle

    def _by_cost(self, is_idle: Flags) -> Ints:
        """Return withheld large pages over idle chunks and chunks of KV only, cheapest first."""
        larges = np.flatnonzero(self.withheld).astype(np.int32)
        if not len(larges):
            return larges
        first, end = self.tiling.first_chunk[larges], self.tiling.end_chunk[larges]
        others = _between(self.owner != Owner.KV, first, end)
        free = others == _between(is_idle, first, end)
        highest = np.where(self.position == NOWHERE, self.slots.num_positions, self.position)
        highest[self.owner == Owner.KV] = NOWHERE
        at = np.maximum.reduceat(np.append(highest, NOWHERE), np.stack([first, end], 1).ravel())
        order = np.lexsort((larges, -at[::2], others))
        cheapest: Ints = larges[order][free[order]]
        return cheapest

    def _taken(self, larges: Ints) -> Flags:
        """Return the chunks under these large pages that are not KV's [num_chunks]."""
        begins = np.zeros(self.tiling.num_chunks + 1, np.int64)
        np.add.at(begins, self.tiling.first_chunk[larges], 1)
        np.add.at(begins, self.tiling.end_chunk[larges], -1)
        under: Flags = (np.cumsum(begins)[:-1] > 0) & (self.owner != Owner.KV)
        return under

    def _completed(self, chosen: Flags) -> Ints:
        """Return the withheld large pages over no chunks but KV's and the chosen ones."""
        larges = np.flatnonzero(self.withheld).astype(np.int32)
        first, end = self.tiling.first_chunk[larges], self.tiling.end_chunk[larges]
        complete: Ints = larges[~(_between((self.owner != Owner.KV) & ~chosen, first, end) > 0)]
        return complete

    # ------------------------------------------------------------------- settling

    def settle(self, plan: Deflation | Inflation, step: int = 0) -> None:
        """Record a plan as carried out: the device has mapped, KV lost or has its large pages."""
        if isinstance(plan, Inflation):
            self.slots.retire(plan.retired)
            self._own(plan.chunks, Owner.KV)
            self.withheld[list(plan.restored)] = False
            return
        if plan.withheld:
            self.withheld[list(plan.withheld)] = True
        if plan.maps:
            self.slots.retire(plan.retired)
            positions, chunks = [p for p, _ in plan.maps], [c for _, c in plan.maps]
            self._own(chunks, Owner.ACTIVATION)
            self.position[chunks] = positions
            self.chunk_at[positions] = chunks
            self.slots.fill(positions)
        if plan.count:
            self.slots.take(plan.start, plan.count, step)
        else:
            self._own(plan.chunks, Owner.ACTIVATION)

    def on_unmapped(self, positions: Sequence[int]) -> None:
        self.slots.clear(positions)
        self.chunk_at[list(positions)] = NOWHERE

    def _own(self, chunks: Sequence[int], owner: Owner) -> None:
        which = list(chunks)
        self.activation_chunks -= int(np.count_nonzero(self.owner[which] == Owner.ACTIVATION))
        self.activation_chunks += len(which) if owner is Owner.ACTIVATION else 0
        self.owner[which] = owner
        self.position[which] = NOWHERE


def _between(flags: Flags, first: Ints, end: Ints) -> LongInts:
    """Return the number of flags that are set from ``first[i]`` to ``end[i]`` - 1."""
    before = np.concatenate([[0], np.cumsum(flags)])
    counts: LongInts = before[end] - before[first]
    return counts
