"""One contract for every chunk device: host (compiled, oracle), CUDA (faked driver), fake."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from bench.gpu.cuda_chunks import CudaChunks
from kvell.device import host_chunks
from kvell.device.chunks import NOT_MAPPED, ChunkDevice, Ints
from kvell.device.host_chunks import HostChunks
from kvell.errors import TryLater
from tests.device.fake_chunks import FakeChunks
from tests.device.faked_driver import FakedDriver
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
