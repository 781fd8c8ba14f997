"""A faked driver that has steps under way: what they touch must be mapped, and stay so."""

from collections import defaultdict
from typing import Any

from typing_extensions import override

from tests.device.faked_driver import GRANULARITY, FakedDriver


class TouchingDriver(FakedDriver):
    """A driver that fails the test if a launch, or an unmapping, would be a fault on a GPU.

    :ivar unfinished: by step, the addresses of the mappings that it may still read or write.
    :ivar unmapped: mappings undone so far.
    """

    def __init__(self, granularity: int = GRANULARITY) -> None:
        super().__init__(granularity)
        self.unfinished = defaultdict[int, set[int]](set)
        self.unmapped = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left: no memory, no address, no step."""
        return not (self.mapped or self.handles or self.reserved or self.unfinished)

    def touch(self, address: int, size_bytes: int, step: int) -> None:
        """Launch work of a step that reads or writes these bytes."""
        first = address // self.granularity * self.granularity
        mappings = set(range(first, address + size_bytes, self.granularity))
        assert mappings <= self.allowed, f"step {step} touches what is not mapped"
        self.unfinished[step] |= mappings

    def finish(self, step: int) -> None:
        for started in [started for started in self.unfinished if started <= step]:
            del self.unfinished[started]

    @override
    def cuMemUnmap(self, ptr: int, size: int) -> tuple[Any, ...]:
        end = ptr + size
        touching = [
            step for step, at in self.unfinished.items() if any(ptr <= one < end for one in at)
        ]
        assert not touching, f"unmapped while steps {touching} may touch it"
        answer = super().cuMemUnmap(ptr, size)
        self.unmapped += answer[0] == self.CUresult.CUDA_SUCCESS
        return answer
