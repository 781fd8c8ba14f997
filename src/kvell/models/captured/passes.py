"""Decode steps of a model, recorded once for each size and then repeated.

::

    host     fill a slot ─► upload ─────► replay ──────────────► download tokens
    device                  slot's range │ ids ◄ last token of each seat, or the slot's
                                         │ layers ─► logits ─► first largest ─► last token of seats

A record sees only memory that stays where it is: the slot's range, the pool, the weights and the
last tokens.  So its Python runs once, whatever the number of layers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvell.models.captured.buckets import bucket_sizes, smallest
from kvell.models.captured.device_step import DeviceMemory, Forward, batch_of, compute
from kvell.models.captured.graphs import Graph, Graphs, Mark
from kvell.models.captured.slots import DecodeRows, Places, fill, places_of, spare_pages
from kvell.pages.layout import GroupSpec

SLOTS = 3
"""Copies on the host: one is filled, one is read by the device, one may still be read."""


@dataclass
class _Slot:
    """A copy on the host: pinned memory, and the place behind its last upload."""

    memory: torch.Tensor
    tokens: torch.Tensor
    read: Mark | None = None


@dataclass(eq=False)
class SlotStep:
    """A step that waits in a slot, or was launched.

    :ivar rows: rows of requests; those behind them are pads.
    :ivar used: numbers of the slot that the device needs.
    :ivar takes_seats: whether the device knows the tokens that the previous step draws.
    """

    rows: int
    places: Places
    slot: _Slot
    used: int
    takes_seats: bool
    done: Mark | None = None

    def put_tokens(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        """Fill in ids that were unknown when the step was made."""
        self.slot.memory.numpy()[self.places.literals][list(rows)] = token_ids

    def wait(self) -> None:
        """Wait for the step."""
        assert self.done is not None, "the step was not launched"
        self.done.wait()

    def tokens(self) -> list[int]:
        """Wait for the step; return the first largest of each row's logits, or NOT_NUMBERS."""
        self.wait()
        tokens: list[int] = self.slot.tokens[: self.rows].tolist()
        return tokens


class StepRecords:
    """The recorded steps of one model.

    :param forward: the model's pass, over attached memory.
    :param groups: the model's groups in its order; None for one without text tokens.
    :param pool: the pool's memory, uint8 [bytes], with a large page behind ``pool_bytes`` for pads.
    :param most_rows: of a step.
    :param most_pages: page ids of a step, all groups together.
    :param seats: requests whose last token stays on the device.
    :ivar counts: steps so far: ``RECORDED``, or by the reason why they were computed.
    """

    def __init__(
        self,
        forward: Forward,
        groups: Sequence[GroupSpec | None],
        graphs: Graphs,
        pool: torch.Tensor,
        pool_bytes: int,
        most_rows: int,
        most_pages: int,
        seats: int = 0,
    ) -> None:
        self._forward, self._graphs, self._no_seat = forward, graphs, seats
        self._most_pages = most_pages
        self.counts = Counter[str]()
        self._sizes = bucket_sizes(most_rows)
        spares = spare_pages(groups, pool, pool_bytes)
        self._places = {rows: places_of(rows, groups, spares, most_pages) for rows in self._sizes}
        largest = max(places.size for places in self._places.values())
        self._memory = DeviceMemory.zeros(largest, seats, pool.device)
        self.slots = [
            _Slot(graphs.pinned_memory(largest), graphs.pinned_memory(self._sizes[-1]))
            for _ in range(SLOTS)
        ]
        self._records: dict[int, Graph] = {}
        self._turn = 0

    def holds(self, rows: int, pages: int) -> bool:
        """Return whether slots have room for a step."""
        return 0 < rows <= self._sizes[-1] and pages <= self._most_pages

    def step(self, decode: DecodeRows) -> SlotStep:
        """Fill the next slot, once the device has read what was there.

        :raises ValueError: if slots do not hold the step.
        """
        rows = len(decode.token_ids)
        size = smallest(self._sizes, rows)
        if size is None or not self.holds(rows, decode.num_pages):
            raise ValueError(f"slots hold no step of {rows} rows and {decode.num_pages} pages")
        places, slot = self._places[size], self.slots[self._turn]
        self._turn = (self._turn + 1) % SLOTS
        if slot.read is not None:
            slot.read.wait()
        used = fill(slot.memory.numpy(), places, decode, self._no_seat)
        return SlotStep(rows, places, slot, used, decode.sources is not None)

    def launch(self, step: SlotStep) -> torch.Tensor:
        """Compute a step; return its logits, float32 [rows, vocab].

        The next step overwrites them.
        """
        record = self._record(step.places)
        graphs, slot = self._graphs, step.slot
        graphs.upload(self._memory.arena[: step.used], slot.memory[: step.used])
        slot.read = graphs.mark()
        record.replay()
        logits, tokens = record.outputs
        graphs.download(slot.tokens[: step.rows], tokens[: step.rows])
        step.done = graphs.mark()
        return logits[: step.rows]

    def follow(self) -> None:
        """Let operations that are called from now on run after all launched steps."""
        self._graphs.follow()

    def record_all(self) -> None:
        """Record every size, the largest first: the others fit its memory."""
        for size in reversed(self._sizes):
            self._record(self._places[size])

    def _record(self, places: Places) -> Graph:
        record = self._records.get(places.rows)
        if record is None:
            slot = np.zeros(places.size, np.int32)
            fill(slot, places, DecodeRows.none(places.groups), self._no_seat)
            memory, forward = self._memory, self._forward
            self._graphs.follow()
            memory.put(torch.from_numpy(slot))
            batch = batch_of(memory, places)
            record = self._graphs.record(lambda: compute(memory, places, batch, forward))
            self._records[places.rows] = record
        return record
