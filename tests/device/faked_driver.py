"""Stands in for ``cuda.bindings.driver``: keeps its rules, counts, fails on demand."""

from enum import IntEnum
from types import SimpleNamespace
from typing import Any

GRANULARITY = 2 << 20


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class Prop:
    def __init__(self) -> None:
        self.type: Any = None
        self.location = SimpleNamespace(type=None, id=None)
        self.flags: Any = None


class FakedDriver:
    """Every rule of the driver that the backend could break is checked here."""

    CUresult = CUresult
    CUmemAllocationProp = Prop
    CUmemAccessDesc = Prop
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(self, granularity: int = GRANULARITY) -> None:
        self.granularity = granularity
        self.reserved: dict[int, int] = {}
        self.handles: set[int] = set()
        self.mapped: dict[int, int] = {}  # address → handle
        self.allowed: set[int] = set()
        self.refuse: dict[str, int] = {}  # call → how many more succeed
        self._next = 1

    def _refuses(self, name: str) -> bool:
        if name not in self.refuse:
            return False
        self.refuse[name] -= 1
        if self.refuse[name] >= 0:
            return False
        del self.refuse[name]
        return True

    def cuInit(self, flags: int) -> tuple[Any, ...]:  # noqa: N802
        assert flags == 0
        return (CUresult.CUDA_SUCCESS,)

    def cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> tuple[Any, ...]:  # noqa: N802
        assert prop.location.type == 1 and option == 0
        return CUresult.CUDA_SUCCESS, self.granularity

    def cuMemAddressReserve(  # noqa: N802
        self, size: int, alignment: int, addr: int, flags: int
    ) -> tuple[Any, ...]:
        if self._refuses("cuMemAddressReserve"):
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        assert size % self.granularity == 0 and (addr, flags) == (0, 0)
        address = (self._next << 40) // alignment * alignment
        self._next += 1
        self.reserved[address] = size
        return CUresult.CUDA_SUCCESS, address

    def cuMemAddressFree(self, ptr: int, size: int) -> tuple[Any, ...]:  # noqa: N802
        assert self.reserved.pop(ptr) == size
        assert not any(ptr <= at < ptr + size for at in self.mapped), "freed while mapped"
        return (CUresult.CUDA_SUCCESS,)

    def cuMemCreate(self, size: int, prop: Any, flags: int) -> tuple[Any, ...]:  # noqa: N802
        if self._refuses("cuMemCreate"):
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        assert size % self.granularity == 0 and prop.type == 1 and flags == 0
        self._next += 1
        self.handles.add(self._next)
        return CUresult.CUDA_SUCCESS, self._next

    def cuMemRelease(self, handle: Any) -> tuple[Any, ...]:  # noqa: N802
        self.handles.remove(handle)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemMap(  # noqa: N802
        self, ptr: int, size: int, offset: int, handle: Any, flags: int
    ) -> tuple[Any, ...]:
        if self._refuses("cuMemMap"):
            return (CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        assert any(at <= ptr and ptr + size <= at + room for at, room in self.reserved.items())
        assert ptr not in self.mapped and handle in self.handles and (offset, flags) == (0, 0)
        self.mapped[ptr] = handle
        return (CUresult.CUDA_SUCCESS,)

    def cuMemUnmap(self, ptr: int, size: int) -> tuple[Any, ...]:  # noqa: N802
        if self._refuses("cuMemUnmap") or ptr not in self.mapped:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        del self.mapped[ptr]
        self.allowed.discard(ptr)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemSetAccess(  # noqa: N802
        self, ptr: int, size: int, desc: list[Any], count: int
    ) -> tuple[Any, ...]:
        if self._refuses("cuMemSetAccess"):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        assert len(desc) == count == 1 and desc[0].flags == 3
        for at in range(ptr, ptr + size, self.granularity):
            assert at in self.mapped, "access to what is not mapped"
            self.allowed.add(at)
        return (CUresult.CUDA_SUCCESS,)
