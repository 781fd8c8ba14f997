"""Neighbours' pools behind one's own: numbers of large pages go on, bytes are theirs, read-only."""

import mmap
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.device import host_chunks
from kvell.device.host import CHUNK_BYTES
from kvell.device.host_chunks import HostChunks
from kvell.errors import TryLater
from kvell.mempool.transports.neighbours import MOST_BEYOND_BYTES, MappedPeers, place_bytes
from tests.oracle import host_calls

LARGE = 3 * 4096 * 5
"""A large page that divides no chunk."""
POOL = 40 * LARGE


@pytest.fixture(params=["compiled", "oracle"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostChunks]:
    if request.param == "compiled":
        pytest.importorskip("kvell.device._host")
    else:
        monkeypatch.setattr(host_chunks, "_host", host_calls)
    made = own_pool(3)
    yield made
    made.close()


def own_pool(most: int) -> HostChunks:
    beyond = MappedPeers.beyond_bytes(POOL, LARGE, most)
    return HostChunks(-(-POOL // CHUNK_BYTES), beyond_bytes=beyond)


def neighbour(byte: int, size_bytes: int = POOL) -> int:
    """A memfd like another process's pool, each large page full of its number plus ``byte``."""
    descriptor = os.memfd_create("neighbour", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size_bytes)
    with mmap.mmap(descriptor, size_bytes) as view:
        for large in range(size_bytes // LARGE):
            view[large * LARGE : (large + 1) * LARGE] = bytes([(byte + large) % 256]) * LARGE
    return descriptor


def test_numbers_of_large_pages_go_on_behind_ones_own(device: HostChunks) -> None:
    neighbours = MappedPeers(device, POOL, LARGE)
    firsts = []
    for byte in (50, 100):
        descriptor = neighbour(byte)
        firsts.append(neighbours.map(descriptor, POOL))
        os.close(descriptor)  # the mapping keeps the memory, as it does when the neighbour dies
    assert firsts[0] * LARGE >= device.home.size_bytes and firsts[0] != firsts[1]
    seen = np.frombuffer(device.view_beyond(), np.uint8)
    for first, byte in zip(firsts, (50, 100), strict=True):
        for large in (0, 1, 39):
            page = seen[(first + large) * LARGE : (first + large + 1) * LARGE]
            assert (page == byte + large).all()


def test_a_neighbour_sees_in_place_what_is_written_later(device: HostChunks) -> None:
    neighbours, descriptor = MappedPeers(device, POOL, LARGE), neighbour(0)
    first = neighbours.map(descriptor, POOL)
    with mmap.mmap(descriptor, POOL) as owner:
        owner[7 * LARGE] = 77
    seen = np.frombuffer(device.view_beyond(), np.uint8)
    assert seen[(first + 7) * LARGE] == 77
    os.close(descriptor)


def test_ones_own_memory_is_as_it_was(device: HostChunks) -> None:
    device.view(device.home)[5] = 9
    neighbours, descriptor = MappedPeers(device, POOL, LARGE), neighbour(1)
    neighbours.map(descriptor, POOL)
    os.close(descriptor)
    assert device.view_beyond()[5] == 9
    assert len(device.view(device.home)) == device.home.size_bytes


def test_places_run_out_and_come_back(device: HostChunks) -> None:
    neighbours, descriptor = MappedPeers(device, POOL, LARGE), neighbour(1)
    firsts = [neighbours.map(descriptor, POOL) for _ in range(neighbours.most)]
    assert len(set(firsts)) == neighbours.most == 3
    with pytest.raises(TryLater, match="no addresses left"):
        neighbours.map(descriptor, POOL)
    neighbours.unmap(firsts[1])
    assert neighbours.map(descriptor, POOL) == firsts[1]
    with pytest.raises(ValueError, match="no peer"):
        neighbours.unmap(firsts[1] + 1)
    os.close(descriptor)


def test_a_larger_neighbour_takes_several_places(device: HostChunks) -> None:
    neighbours = MappedPeers(device, POOL, LARGE)
    size = place_bytes(POOL, LARGE) + LARGE
    descriptor = neighbour(3, size)
    first = neighbours.map(descriptor, size)
    seen = np.frombuffer(device.view_beyond(), np.uint8)
    last = size // LARGE - 1
    assert seen[(first + last) * LARGE] == (3 + last) % 256
    small = neighbour(9)
    other = neighbours.map(small, POOL)
    with pytest.raises(TryLater):
        neighbours.map(small, POOL)
    assert abs(other - first) * LARGE >= size
    neighbours.unmap(first)
    assert neighbours.map(small, POOL) == first
    os.close(descriptor)
    os.close(small)


def test_what_is_no_memory_is_refused_and_takes_no_place(device: HostChunks) -> None:
    neighbours = MappedPeers(device, POOL, LARGE)
    read, write = os.pipe()
    for _ in range(neighbours.most + 1):
        with pytest.raises(TryLater, match="cannot map"):
            neighbours.map(read, POOL)
    os.close(read)
    os.close(write)
    descriptor = neighbour(2)
    assert neighbours.map(descriptor, POOL)
    os.close(descriptor)


def test_without_addresses_behind_it_a_pool_has_no_neighbours() -> None:
    device = own_pool(0)
    neighbours, descriptor = MappedPeers(device, POOL, LARGE), neighbour(1)
    assert device.beyond_bytes == neighbours.most == 0
    with pytest.raises(TryLater):
        neighbours.map(descriptor, POOL)
    with pytest.raises(ValueError, match="after the home range"):
        device.map_beyond(0, descriptor, LARGE)
    os.close(descriptor)
    device.close()


@pytest.mark.parametrize("forgotten", [False, True])
def test_nobody_writes_into_a_neighbour_or_reads_where_it_was(forgotten: bool) -> None:
    """In a process of its own, since it ends by a signal."""
    touch = "view[first * LARGE]" if forgotten else "view[first * LARGE] = 1"
    script = f"""
        from tests.mempool.transports.test_mempool_neighbours import *
        device = own_pool(2)
        neighbours = MappedPeers(device, POOL, LARGE)
        first = neighbours.map(neighbour(4), POOL)
        view = device.view_beyond()
        assert view[first * LARGE] == 4
        if {forgotten}:
            neighbours.unmap(first)
        print("so far", flush=True)
        {touch}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, check=False, text=True
    )
    assert done.stdout == "so far\n" and done.returncode == -11, done.stderr


@given(
    large=st.integers(1, 5000).map(lambda n: 8 * n),
    count=st.integers(1, 3000),
    most=st.integers(0, 100),
)
def test_every_place_begins_at_a_large_page_and_at_a_chunk(
    large: int, count: int, most: int
) -> None:
    pool = large * count
    place = place_bytes(pool, large)
    assert place >= pool and place % large == 0 and place % CHUNK_BYTES == 0
    beyond = MappedPeers.beyond_bytes(pool, large, most)
    assert beyond <= MOST_BEYOND_BYTES + place
    device_bytes = -(-pool // CHUNK_BYTES) * CHUNK_BYTES + beyond
    assert device_bytes // place - 1 == most if beyond else most == 0
