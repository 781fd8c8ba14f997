"""Host chunks: aliases see the same bytes, huge pages, other processes' view, refusals."""

import gc
import mmap
import os
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from kvell.device import host_chunks
from kvell.device.chunks import Ints
from kvell.device.host_chunks import HostChunks
from kvell.errors import ChangeSomething, TryLater
from tests.oracle import host_calls

SIZE = HostChunks.chunk_bytes


def ints(*values: int) -> Ints:
    return np.asarray(values, np.int32)


@pytest.fixture(params=["compiled", "oracle"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostChunks]:
    if request.param == "compiled":
        pytest.importorskip("kvell.device._host")
    else:
        monkeypatch.setattr(host_chunks, "_host", host_calls)
    made = HostChunks(4)
    made.commit(ints(0, 1, 2))
    yield made
    made.close()


@pytest.mark.parametrize("populate", [False, True])
def test_every_alias_of_a_chunk_sees_its_bytes(device: HostChunks, populate: bool) -> None:
    area = device.reserve(3)
    device.map(area, ints(0, 2), ints(2, 2), populate=populate)
    home, view = device.view(device.home), device.view(area)
    home[2 * SIZE : 2 * SIZE + 4] = b"page"
    assert bytes(view[:4]) == bytes(view[2 * SIZE : 2 * SIZE + 4]) == b"page"
    view[SIZE - 1] = 7
    assert home[3 * SIZE - 1] == 7


def test_a_chunk_keeps_its_bytes_while_its_addresses_change(device: HostChunks) -> None:
    area = device.reserve(2)
    device.map(area, ints(0, 1), ints(0, 1))
    view = device.view(area)
    view[SIZE : SIZE + 3] = b"one"
    assert device.unmap(area, ints(0, 1)) == 2
    device.map(area, ints(0, 1), ints(1, 0))
    assert bytes(view[:3]) == b"one"
    assert bytes(view[SIZE : SIZE + 3]) == bytes(3)


def test_committed_memory_is_there_and_zero(device: HostChunks) -> None:
    committed_bytes = os.fstat(device.descriptor).st_blocks * 512
    assert committed_bytes == 3 * SIZE
    assert 0 <= device.num_huge <= 3
    assert not any(device.view(device.home)[: 3 * SIZE : 4096])


def test_another_mapping_of_the_descriptor_sees_the_same_bytes(device: HostChunks) -> None:
    with mmap.mmap(device.descriptor, SIZE, prot=mmap.PROT_READ, offset=SIZE) as peer:
        device.view(device.home)[SIZE : SIZE + 4] = b"lent"
        assert peer[:4] == b"lent"


def test_more_addresses_than_there_are_is_try_later(device: HostChunks) -> None:
    with pytest.raises(TryLater, match="no addresses left"):
        device.reserve(1 << 30)


def test_a_pool_the_system_refuses_names_the_flag() -> None:
    with pytest.raises(ChangeSomething, match="cannot be mapped") as told:
        HostChunks(1 << 42)
    assert told.value.field == "--memory"


class Refusing:
    """The system calls, but for one that refuses."""

    def __init__(self, name: str, done: int) -> None:
        self._name, self._done = name, done

    def __getattr__(self, name: str) -> object:
        return getattr(host_calls, name)

    def map_chunks(
        self, at: int, file: int, size: int, to: int, what: int, count: int, populate: bool
    ) -> tuple[int, int]:
        """Does a part, then refuses."""
        if self._name != "map":
            return host_calls.map_chunks(at, file, size, to, what, count, populate)
        host_calls.map_chunks(at, file, size, to, what, self._done, populate)
        return self._done, 12

    def commit_chunks(self, at: int, size: int, which: int, count: int) -> tuple[int, int, int]:
        """Does a part, then refuses."""
        if self._name != "commit":
            return host_calls.commit_chunks(at, size, which, count)
        host_calls.commit_chunks(at, size, which, self._done)
        return self._done, 0, 12


def test_a_mapping_that_is_refused_half_way_is_undone(
    device: HostChunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    area = device.reserve(3)
    monkeypatch.setattr(host_chunks, "_host", Refusing("map", 2))
    with pytest.raises(TryLater, match="Cannot allocate memory"):
        device.map(area, ints(0, 1, 2), ints(0, 1, 2))
    assert (area.table == -1).all()
    pid_maps = open("/proc/self/maps").read()  # noqa: SIM115, PTH123
    assert not any(
        line.startswith(f"{area.address:x}-") and "kvell-chunks" in line
        for line in pid_maps.splitlines()
    )


def test_a_commit_that_is_refused_keeps_what_it_got(monkeypatch: pytest.MonkeyPatch) -> None:
    device = HostChunks(3)
    monkeypatch.setattr(host_chunks, "_host", Refusing("commit", 1))
    with pytest.raises(TryLater, match="no memory for a chunk"):
        device.commit(ints(2, 0))
    assert device.home.table.tolist() == [-1, -1, 2]
    monkeypatch.setattr(host_chunks, "_host", host_calls)
    device.commit(ints(2, 0))
    assert device.home.table.tolist() == [0, -1, 2]
    device.close()


def test_a_view_keeps_a_device_that_nobody_closes() -> None:
    held = HostChunks(2)
    gone = weakref.ref(held)
    held.commit(np.arange(2, dtype=np.int32))
    view = held.view(held.home)
    del held
    gc.collect()
    view[0] = 7
    assert view[0] == 7
    del view
    gc.collect()
    assert gone() is None
