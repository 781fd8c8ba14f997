"""Chunks of a GPU's memory through the driver's virtual memory calls; addresses only.

A chunk is one ``cuMemCreate`` handle. Tensors over these addresses are made where torch is imported
(``models``); this package never imports it. The calling thread has the device's primary context
current, as torch leaves it. eLLM §4.2, §5.1: a handle may be mapped at several addresses, so a
chunk changes owner before its old mapping is undone.
"""

import importlib
from typing import Any, Protocol

from kvell.device.chunks import (
    NOT_MAPPED,
    AddressRange,
    Ints,
    check_map,
    check_unmap,
    find_uncommitted,
)
from kvell.errors import ChangeSomething, TryLater
from kvell.runs import runs
from kvell.vocabulary import MIB

CHUNK_BYTES = 2 * MIB
"""Smallest chunk; a driver whose granularity is larger decides."""


class Driver(Protocol):
    """The used part of ``cuda.bindings.driver``: each call returns (CUresult, values …)."""

    CUresult: Any
    CUmemAllocationProp: Any
    CUmemAccessDesc: Any
    CUmemAllocationType: Any
    CUmemLocationType: Any
    CUmemAccess_flags: Any
    CUmemAllocationGranularity_flags: Any

    # The names are the driver's own.
    def cuInit(self, Flags: int, /) -> tuple[Any, ...]: ...  # noqa: N802, N803
    def cuMemGetAllocationGranularity(  # noqa: N802
        self, prop: Any, option: Any, /
    ) -> tuple[Any, ...]: ...
    def cuMemAddressReserve(  # noqa: N802
        self, size: int, alignment: int, addr: int, flags: int, /
    ) -> tuple[Any, ...]: ...
    def cuMemAddressFree(self, ptr: int, size: int, /) -> tuple[Any, ...]: ...  # noqa: N802
    def cuMemCreate(self, size: int, prop: Any, flags: int, /) -> tuple[Any, ...]: ...  # noqa: N802
    def cuMemRelease(self, handle: Any, /) -> tuple[Any, ...]: ...  # noqa: N802
    def cuMemMap(  # noqa: N802
        self, ptr: int, size: int, offset: int, handle: Any, flags: int, /
    ) -> tuple[Any, ...]: ...
    def cuMemUnmap(self, ptr: int, size: int, /) -> tuple[Any, ...]: ...  # noqa: N802
    def cuMemSetAccess(  # noqa: N802
        self, ptr: int, size: int, desc: list[Any], count: int, /
    ) -> tuple[Any, ...]: ...


class CudaChunks:
    """:class:`kvell.device.chunks.ChunkDevice` over one GPU."""

    def __init__(self, num_chunks: int, ordinal: int = 0, driver: Driver | None = None) -> None:
        """Reserve addresses for ``num_chunks``; none has memory yet.

        :param ordinal: number of the GPU.
        :param driver: ``cuda.bindings.driver``, or a stand-in for it.
        :raises ChangeSomething: if there is no driver, no GPU, or too little address space.
        """
        self._driver = driver or _load()
        self._start(ordinal)
        self.num_chunks = num_chunks
        self._handles: dict[int, Any] = {}
        self._ranges: list[AddressRange] = []
        self._open = True
        try:
            self.home = self.reserve(num_chunks)
        except TryLater as error:
            size_bytes = num_chunks * self.chunk_bytes
            raise ChangeSomething(
                "--memory", f"{size_bytes}B", f"cannot be reserved ({error})", "use less"
            ) from error

    def commit(self, chunks: Ints) -> None:
        """Implement :meth:`ChunkDevice.commit`."""
        self._require_open()
        for chunk in find_uncommitted(self.home, chunks).tolist():
            (handle,) = self._call("cuMemCreate", self.chunk_bytes, self._prop, 0)
            try:
                self._map_one(self.home, chunk, handle)
                self._allow(self.home, chunk, 1)
            except TryLater:
                self._unmap_one(self.home, chunk)
                self._driver.cuMemRelease(handle)
                raise
            self._handles[chunk] = handle
            self.home.table[chunk] = chunk

    def reserve(self, num_positions: int) -> AddressRange:
        self._require_open()
        size_bytes = num_positions * self.chunk_bytes
        (address,) = self._call("cuMemAddressReserve", size_bytes, self.chunk_bytes, 0, 0)
        self._ranges.append(AddressRange(int(address), num_positions, self.chunk_bytes))
        return self._ranges[-1]

    def map(self, area: AddressRange, positions: Ints, chunks: Ints) -> None:
        """Implement :meth:`ChunkDevice.map`."""
        self._require_open()
        check_map(self.home, area, positions, chunks)
        done: list[int] = []
        try:
            for position, chunk in zip(positions.tolist(), chunks.tolist(), strict=True):
                self._map_one(area, position, self._handles[chunk])
                done.append(position)
            for start, count in runs(done):
                self._allow(area, done[start], count)
        except TryLater:
            for position in done:
                self._unmap_one(area, position)
            raise
        area.table[positions] = chunks

    def unmap(self, area: AddressRange, positions: Ints) -> int:
        """Implement :meth:`ChunkDevice.unmap`."""
        self._require_open()
        check_unmap(self.home, area, positions)
        for done, position in enumerate(positions.tolist()):
            if not self._unmap_one(area, position):
                return done
            area.table[position] = NOT_MAPPED
        return len(positions)

    def close(self) -> None:
        """Implement :meth:`ChunkDevice.close`."""
        if not self._open:
            return
        self._open = False
        for area in self._ranges:
            for position in (area.table != NOT_MAPPED).nonzero()[0].tolist():
                self._unmap_one(area, position)
            self._driver.cuMemAddressFree(area.address, area.size_bytes)
        for handle in self._handles.values():
            self._driver.cuMemRelease(handle)

    # ------------------------------------------------------------------ the driver

    def _start(self, ordinal: int) -> None:
        driver = self._driver
        try:
            self._check(driver.cuInit(0))
            self._prop = driver.CUmemAllocationProp()
            self._prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            device = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            self._prop.location.type = device
            self._prop.location.id = ordinal
            self._access = driver.CUmemAccessDesc()
            self._access.location.type = device
            self._access.location.id = ordinal
            both = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            self._access.flags = both
            flags = driver.CUmemAllocationGranularity_flags
            smallest = flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            (granularity,) = self._check(driver.cuMemGetAllocationGranularity(self._prop, smallest))
        except (RuntimeError, TryLater) as error:  # without a driver the first call raises
            raise ChangeSomething(
                "--device", f"cuda:{ordinal}", f"cannot be used ({error})", "use --device cpu"
            ) from error
        self.chunk_bytes = -(-CHUNK_BYTES // int(granularity)) * int(granularity)

    def _map_one(self, area: AddressRange, position: int, handle: Any) -> None:
        self._call("cuMemMap", self._at(area, position), self.chunk_bytes, 0, handle, 0)

    def _unmap_one(self, area: AddressRange, position: int) -> bool:
        (result,) = self._driver.cuMemUnmap(self._at(area, position), self.chunk_bytes)
        return bool(result == self._driver.CUresult.CUDA_SUCCESS)

    def _allow(self, area: AddressRange, first: int, count: int) -> None:
        size_bytes = count * self.chunk_bytes
        self._call("cuMemSetAccess", self._at(area, first), size_bytes, [self._access], 1)

    def _at(self, area: AddressRange, position: int) -> int:
        return area.address + position * self.chunk_bytes

    def _call(self, name: str, *arguments: object) -> tuple[Any, ...]:
        return self._check(getattr(self._driver, name)(*arguments))

    def _check(self, answer: tuple[Any, ...]) -> tuple[Any, ...]:
        result, *values = answer
        if result != self._driver.CUresult.CUDA_SUCCESS:
            raise TryLater(f"device: {getattr(result, 'name', result)}")
        return tuple(values)

    def _require_open(self) -> None:
        if not self._open:
            raise ValueError("the device is closed")


def _load() -> Driver:
    try:
        driver: Driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ChangeSomething(
            "--device", "cuda", "needs the package cuda-bindings", "install kvell[cuda]"
        ) from error
    return driver
