"""The device's order of work, and steps that it records."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Outputs = Sequence[torch.Tensor]


class Mark(Protocol):
    """A place in the device's order of work."""

    def synchronize(self) -> None:
        """Wait until everything before it is done."""
        ...


class Graph(Protocol):
    """A recorded step.

    :ivar outputs: what it computes, always in the same memory.
    """

    outputs: Outputs

    def replay(self) -> None:
        """Compute it again, after everything that the device was given before."""
        ...


class Graphs(Protocol):
    """A device that does what it is given in order, later than it is given."""

    def follow(self) -> None:
        """Let operations that are called from now on run after all work so far."""
        ...

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy from pinned host memory, which must not change until it is done."""
        ...

    def download(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy to pinned host memory, which holds the values once it is done."""
        ...

    def mark(self) -> Mark:
        """Return the place behind all work so far."""
        ...

    def record(self, step: Callable[[], Outputs]) -> Graph:
        """Record a step, which reads and writes only memory that stays where it is."""
        ...

    def pinned_memory(self, numbers: int) -> torch.Tensor:
        """Return int32 [numbers] in host memory that :meth:`upload` and :meth:`download` take."""
        ...


class CudaGraphs:
    """The current stream of a GPU, and CUDA graphs that share one pool of memory."""

    WARMUPS = 2
    """Runs before a recording: libraries allocate and choose algorithms in the first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def follow(self) -> None:
        """Let operations that are called from now on run after all work so far: they do."""

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def download(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def record(self, step: Callable[[], Outputs]) -> Graph:
        beside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(beside):
            for _ in range(self.WARMUPS):
                step()
        torch.cuda.current_stream(self._device).wait_stream(beside)
        graph = _CudaGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            graph.outputs = step()
        return graph

    def pinned_memory(self, numbers: int) -> torch.Tensor:
        return torch.zeros(numbers, dtype=torch.int32, pin_memory=True)


class _CudaGraph(torch.cuda.CUDAGraph):
    outputs: Outputs
