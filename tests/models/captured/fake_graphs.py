"""A device of the tests: it runs late and in order, and its records are run again and compared."""

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch

from kvell.attention.interface import (
    AttendParams,
    AttentionKernels,
    GroupBatch,
    LayerPages,
    Partial,
)
from tests.models.captured.tape import NotRepeatableError, Tape, one_launch, recorded

POISON = 0x5F5F5F5F
"""What stands in host memory once the device has read it: no token, page or seat."""


class LazyStream:
    """Work that runs only when somebody waits for it, or now and then by chance.

    :param chance: decides how much runs early; None: nothing does.
    """

    def __init__(self, chance: Random | None = None) -> None:
        self._chance = chance
        self._waiting = deque[Callable[[], None]]()
        self._asked = self._done = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def follow(self) -> None:
        self.settle()

    def run(self, work: Callable[[], None]) -> None:
        self._waiting.append(work)
        self._asked += 1
        if self._chance is not None:
            self.advance(self._done + self._chance.randint(0, len(self._waiting)))

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy from host memory, which is poisoned afterwards: nothing may read it again."""

        def copy() -> None:
            target.copy_(source)
            source.fill_(POISON)

        self.run(copy)

    def download(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy to host memory, which is poisoned until then."""
        target.fill_(POISON)

        def copy() -> None:
            target.copy_(source)

        self.run(copy)

    def mark(self) -> "LazyMark":
        return LazyMark(self, self._asked)

    def pinned_memory(self, numbers: int) -> torch.Tensor:
        return torch.full((numbers,), POISON, dtype=torch.int32)

    def settle(self) -> None:
        self.advance(self._asked)

    def advance(self, until: int) -> None:
        while self._done < until:
            self._waiting.popleft()()
            self._done += 1


class LazyMark:
    def __init__(self, stream: LazyStream, place: int) -> None:
        self._stream, self._place = stream, place

    def synchronize(self) -> None:
        """Do everything before it."""
        self._stream.advance(self._place)


class FakeGraphs(LazyStream):
    """A stream that records steps: a replay runs the step again, and must do just the same.

    :ivar replays: number of replays that have run.
    """

    def __init__(self, chance: Random | None = None) -> None:
        super().__init__(chance)
        self.replays = 0

    def record(self, step: Callable[[], Sequence[torch.Tensor]]) -> "FakeGraph":
        """Record a step, which reads and writes only memory that stays where it is."""
        self.settle()
        return FakeGraph(self, step)


class FakeGraph:
    def __init__(self, graphs: FakeGraphs, step: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._graphs, self._step = graphs, step
        self._tape, outputs = recorded(step)
        self.outputs: Sequence[torch.Tensor] = [output.clone() for output in outputs]

    @property
    def tape(self) -> Tape:
        return self._tape

    def replay(self) -> None:
        self._graphs.run(self._again)

    def _again(self) -> None:
        tape, outputs = recorded(self._step)
        self._tape.compare(tape)
        for mine, now in zip(self.outputs, outputs, strict=True):
            if (mine.shape, mine.dtype) != (now.shape, now.dtype):
                raise NotRepeatableError(f"an output of {mine.shape} is of {now.shape}")
            mine.copy_(now)
        self._graphs.replays += 1


class Launched:
    """Kernels, each call of which is one launch with the same arguments every time."""

    name = "launched"

    def __init__(self, kernels: AttentionKernels) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def write_kv(
        self, layer: LayerPages, batch: GroupBatch, key: torch.Tensor, value: torch.Tensor | None
    ) -> None:
        with one_launch("write_kv", *_said(layer, batch), key, value):
            self._kernels.write_kv(layer, batch, key, value)

    def attend(
        self,
        layer: LayerPages,
        batch: GroupBatch,
        query: torch.Tensor,
        params: AttendParams,
        elsewhere: object = None,
    ) -> torch.Tensor:
        assert elsewhere is None
        with one_launch("attend", *_said(layer, batch), query, _numbers(params)) as made:
            output = self._kernels.attend(layer, batch, query, params)
            made(output)
        return output

    def attend_partial(
        self, layer: LayerPages, batch: GroupBatch, query: torch.Tensor, params: AttendParams
    ) -> Partial:
        raise NotImplementedError("recorded steps attend to whole contexts")


def _said(layer: LayerPages, batch: GroupBatch) -> tuple[object, ...]:
    fields = (
        batch.query_starts, batch.context_lens, batch.table_starts, batch.page_ids,
        batch.first_positions, batch.write_page_ids, batch.write_offsets,
    )  # fmt: skip
    return layer.pool, layer.layer_offset_bytes, layer.page_stride_bytes, *fields


def _numbers(params: AttendParams) -> tuple[object, ...]:
    has_sinks = params.sinks is not None
    return params.scale, params.window_tokens, params.softcap, params.chunk_tokens, has_sinks
