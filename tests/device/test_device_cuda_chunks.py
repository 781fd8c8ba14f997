"""CUDA chunks against a faked driver: its rules are kept, refusals undone, nothing leaks."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from bench.gpu.cuda_chunks import CudaChunks
from kvell.device.chunks import Ints
from kvell.errors import ChangeSomething, TryLater
from tests.device.faked_driver import CUresult, FakedDriver


def ints(*values: int) -> Ints:
    return np.asarray(values, np.int32)


def test_everything_mapped_may_be_accessed_and_closing_leaves_nothing() -> None:
    driver = FakedDriver()
    device = CudaChunks(4, ordinal=1, driver=driver)
    device.commit(ints(0, 2, 3))
    area = device.reserve(4)
    device.map(area, ints(0, 1, 3), ints(2, 3, 0))
    assert driver.allowed == set(driver.mapped)
    assert len(driver.handles) == 3 and len(driver.mapped) == 6
    at = [area.address + n * device.chunk_bytes for n in (0, 1, 3)]
    home = [device.home.address + n * device.chunk_bytes for n in (2, 3, 0)]
    assert [driver.mapped[a] for a in at] == [driver.mapped[h] for h in home]
    device.close()
    assert not (driver.mapped or driver.handles or driver.reserved)


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_a_commit_that_is_refused_keeps_those_before_and_leaks_nothing(call: str) -> None:
    driver = FakedDriver()
    device = CudaChunks(3, driver=driver)
    driver.refuse[call] = 1
    with pytest.raises(TryLater, match="CUDA_ERROR"):
        device.commit(ints(1, 2))
    assert device.home.table.tolist() == [-1, 1, -1]
    assert len(driver.handles) == len(driver.mapped) == 1
    device.commit(ints(1, 2))
    assert device.home.table.tolist() == [-1, 1, 2]


def test_access_that_is_refused_undoes_the_mapping() -> None:
    driver = FakedDriver()
    device = CudaChunks(2, driver=driver)
    device.commit(ints(0, 1))
    area = device.reserve(4)
    driver.refuse["cuMemSetAccess"] = 1
    with pytest.raises(TryLater):
        device.map(area, ints(0, 2), ints(0, 1))
    assert (area.table == -1).all() and len(driver.mapped) == 2


def test_chunks_grow_to_the_granularity() -> None:
    assert CudaChunks(1, driver=FakedDriver(3 << 19)).chunk_bytes == 3 << 20
    assert CudaChunks(1, driver=FakedDriver(4 << 20)).chunk_bytes == 4 << 20


def test_no_driver_no_package_no_room_name_what_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Missing(FakedDriver):
        def cuInit(self, flags: int) -> tuple[object, ...]:  # noqa: N802
            raise RuntimeError("no driver here")

    with pytest.raises(ChangeSomething, match="no driver here") as told:
        CudaChunks(1, driver=Missing())
    assert told.value.field == "--device"

    class Absent(FakedDriver):
        def cuInit(self, flags: int) -> tuple[object, ...]:  # noqa: N802
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)

    with pytest.raises(ChangeSomething, match="CUDA_ERROR_INVALID_VALUE"):
        CudaChunks(1, driver=Absent())

    full = FakedDriver()
    full.refuse["cuMemAddressReserve"] = 0
    with pytest.raises(ChangeSomething, match="cannot be reserved") as told:
        CudaChunks(1, driver=full)
    assert told.value.field == "--memory"

    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(ChangeSomething, match="cuda-bindings"):
        CudaChunks(1)


def test_the_package_has_every_name_that_is_used() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    ours = {name for name in vars(FakedDriver) if name.startswith(("cu", "CU"))}
    assert len(ours) == 16
    for name in ours:
        theirs, mine = getattr(driver, name), getattr(FakedDriver, name)
        if isinstance(mine, SimpleNamespace):
            assert vars(mine).keys() <= vars(theirs).keys() | set(theirs.__members__)
    prop = driver.CUmemAllocationProp()
    prop.location.id = 1
    assert prop.location.id == 1
