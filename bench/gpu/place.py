"""Where checks and timings run: on a GPU, or on a CPU that pretends to be one."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.gpu.cuda_chunks import CudaChunks
from kvell.attention.interface import AttentionKernels
from kvell.attention.portable import PortableKernels
from kvell.attention.triton.backend import TritonKernels
from kvell.attention.triton.sizes import Blocks
from kvell.device.chunks import ChunkDevice
from kvell.device.host_chunks import HostChunks
from kvell.models.captured.graphs import CudaGraphs, Graphs
from tests.models.captured.fake_graphs import FakeGraphs, Launched

SMALL_BLOCKS = (Blocks(16, 16, 4, 1, section_tokens=32), Blocks(32, 16, 4, 1))
"""Small cases have several of these."""

BUSY_CYCLES = 40_000_000
"""Of a GPU's clock, near 2 GHz."""


@dataclass(frozen=True)
class Place:
    """A device.

    :param pretends: the sizes are tiny, kernels run in Triton's interpreter, and figures mean
        nothing: such a run shows only that all code runs to its end.
    """

    device: torch.device
    pretends: bool

    @staticmethod
    def of(pretends: bool) -> "Place":
        """Return the CPU if it is to pretend, else the GPU."""
        return Place(torch.device("cpu" if pretends else "cuda"), pretends)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of queries and plain caches; the interpreter lacks casts to bfloat16."""
        return torch.float32 if self.pretends else torch.bfloat16

    def kernels(self) -> TritonKernels:
        """Return attention kernels for this place."""
        return TritonKernels(SMALL_BLOCKS if self.pretends else None)

    def engine_kernels(self) -> AttentionKernels:
        """Return kernels for whole engines, which would take minutes in the interpreter."""
        return PortableKernels() if self.pretends else self.kernels()

    def graphs(self) -> Graphs:
        """Return what records decode steps."""
        return FakeGraphs() if self.pretends else CudaGraphs(self.device)

    def recorded_kernels(self) -> AttentionKernels:
        """Return kernels for engines whose decode steps are recorded."""
        return Launched(PortableKernels()) if self.pretends else self.kernels()

    def chunks(self, count: int) -> ChunkDevice:
        """Return chunks of the device's memory; of the host's if it pretends."""
        return HostChunks(count) if self.pretends else CudaChunks(count)

    def memory_bytes(self) -> int:
        """Return the memory of the device; little if it pretends."""
        return 1 << 30 if self.pretends else torch.cuda.mem_get_info()[1]

    def busy(self) -> Callable[[], bool]:
        """Start a kernel of some 20 ms; return what says whether it still runs."""
        if self.pretends:
            return lambda: False
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return lambda: not done.query()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait for all work of the device."""
        if not self.pretends:
            torch.cuda.synchronize()

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Return host memory that the device can copy from and to by itself."""
        return torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=not self.pretends)
