"""One contract for every chunk device, and what CUDA's adds over a faked driver."""

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from bench.gpu.cuda_chunks import CudaChunks
from kvell.device import host_chunks
from kvell.device.chunks import NOT_MAPPED, ChunkDevice, Ints
from kvell.device.host_chunks import HostChunks
from kvell.errors import ChangeSomething, TryLater
from tests.device.fake_chunks import FakeChunks
from tests.device.faked_driver import CUresult, FakedDriver
from tests.oracle import host_calls

CHUNKS = 6


def _cuda() -> ChunkDevice:
    return CudaChunks(CHUNKS, driver=FakedDriver())


def _fake() -> ChunkDevice:
    return FakeChunks(CHUNKS)


@pytest.fixture(params=["compiled", "oracle", "cuda", "fake"])
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ChunkDevice]:
    if request.param == "compiled":
        pytest.importorskip("kvell.device._host")
    if request.param == "oracle":
        monkeypatch.setattr(host_chunks, "_host", host_calls)
    makers: dict[str, Callable[[], ChunkDevice]] = {"cuda": _cuda, "fake": _fake}
    made = makers.get(request.param, lambda: HostChunks(CHUNKS))()
    yield made
    made.close()


def ints(*values: int) -> Ints:
    return np.asarray(values, np.int32)


def test_nothing_is_committed_at_first(device: ChunkDevice) -> None:
    assert device.num_chunks == device.home.num_positions == CHUNKS
    assert device.home.size_bytes == CHUNKS * device.chunk_bytes
    assert (device.home.table == NOT_MAPPED).all()
    assert device.home.address % device.chunk_bytes == 0


def test_committed_chunks_are_at_home_and_committing_twice_is_harmless(
    device: ChunkDevice,
) -> None:
    device.commit(ints(4, 1, 4))
    device.commit(ints(1))
    assert device.home.table.tolist() == [NOT_MAPPED, 1, NOT_MAPPED, NOT_MAPPED, 4, NOT_MAPPED]


def test_a_chunk_may_be_at_several_positions_and_leaves_them_one_by_one(
    device: ChunkDevice,
) -> None:
    device.commit(ints(0, 1, 2))
    area, other = device.reserve(4), device.reserve(2)
    assert area.address != other.address != device.home.address
    device.map(area, ints(2, 3, 0), ints(0, 1, 0))
    device.map(other, ints(1), ints(0))
    assert area.table.tolist() == [0, NOT_MAPPED, 0, 1]
    assert device.unmap(area, ints(0, 3)) == 2
    assert area.table.tolist() == [NOT_MAPPED, NOT_MAPPED, 0, NOT_MAPPED]
    assert other.table.tolist() == [NOT_MAPPED, 0]
    device.map(area, ints(0), ints(2))
    assert area.table[0] == 2


def test_empty_batches_do_nothing(device: ChunkDevice) -> None:
    area = device.reserve(1)
    device.commit(ints())
    device.map(area, ints(), ints())
    assert device.unmap(area, ints()) == 0


@pytest.mark.parametrize(
    ("positions", "chunks", "problem"),
    [
        ((0,), (0,), "mapped already"),
        ((1, 1), (0, 1), "named twice"),
        ((4,), (0,), "no such position"),
        ((-1,), (0,), "no such position"),
        ((1,), (CHUNKS,), "no such chunk"),
        ((1,), (5,), "no memory yet"),
        ((1, 2), (0,), "2 positions for 1 chunks"),
    ],
)
def test_wrong_mappings_are_refused_and_change_nothing(
    device: ChunkDevice, positions: tuple[int, ...], chunks: tuple[int, ...], problem: str
) -> None:
    device.commit(ints(0, 1))
    area = device.reserve(4)
    device.map(area, ints(0), ints(1))
    with pytest.raises(ValueError, match=problem):
        device.map(area, ints(*positions), ints(*chunks))
    assert area.table.tolist() == [1, NOT_MAPPED, NOT_MAPPED, NOT_MAPPED]


def test_only_what_is_mapped_can_be_unmapped_and_home_stays(device: ChunkDevice) -> None:
    device.commit(ints(0))
    area = device.reserve(2)
    with pytest.raises(ValueError, match="not mapped"):
        device.unmap(area, ints(1))
    with pytest.raises(ValueError, match="cannot move on this device"):
        device.unmap(device.home, ints(0))
    with pytest.raises(ValueError, match="have their own positions from their commit on"):
        device.map(device.home, ints(1), ints(0))
    with pytest.raises(ValueError, match="no such chunk"):
        device.commit(ints(CHUNKS))


def test_a_closed_device_refuses_everything_but_closing(device: ChunkDevice) -> None:
    device.commit(ints(0))
    area = device.reserve(1)
    device.map(area, ints(0), ints(0))
    device.close()
    device.close()
    for call in (
        lambda: device.commit(ints(1)),
        lambda: device.reserve(1),
        lambda: device.map(area, ints(0), ints(0)),
        lambda: device.unmap(area, ints(0)),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_what_the_system_refuses_leaves_fakes_as_they_were() -> None:
    """Where refusals can be injected: the fake and the faked driver."""
    driver = FakedDriver()
    fake, cuda = FakeChunks(CHUNKS), CudaChunks(CHUNKS, driver=driver)
    for device in (fake, cuda):
        device.commit(ints(0, 1, 2))
        area = device.reserve(3)
        if isinstance(device, FakeChunks):
            device.fail("map", after=1)
        else:
            driver.refuse["cuMemMap"] = 1
        with pytest.raises(TryLater):
            device.map(area, ints(0, 1, 2), ints(0, 1, 2))
        assert (area.table == NOT_MAPPED).all()
        device.map(area, ints(0, 1, 2), ints(0, 1, 2))
        if isinstance(device, FakeChunks):
            device.fail("unmap", after=2)
        else:
            driver.refuse["cuMemUnmap"] = 2
        assert device.unmap(area, ints(2, 1, 0)) == 2
        assert area.table.tolist() == [0, NOT_MAPPED, NOT_MAPPED]
        assert device.unmap(area, ints(0)) == 1


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
