"""What chunks of memory cost that the driver maps, and whether all addresses of one agree.

``--memory`` on a GPU is planned on these figures: ``bench.gpu.cuda_chunks``.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from bench.gpu.addressed import AddressedBytes
from bench.gpu.place import Place
from bench.gpu.report import Row, check, figures
from bench.gpu.sizes import sizes_of
from kvell.device.chunks import AddressRange, ChunkDevice, Ints


def rows(pretends: bool, part: int, of: int) -> Iterator[Row]:
    """Yield the times of commit, map and unmap, idle and beside a kernel, and checks of aliases."""
    place, sizes = Place.of(pretends), sizes_of(pretends)
    place.wait()  # the driver's calls need the context that torch makes
    most = max(sizes.chunk_counts)
    device = place.chunks(2 * most)
    try:
        yield figures("commit", partial(commit, device, most))
        area = device.reserve(2 * most)
        for count in sizes.chunk_counts:
            for apart in (False, True):
                for busy in (False, True):
                    name = f"map {count}, apart {apart}, busy {busy}"
                    call = partial(mapped, place, device, area, count, apart=apart, busy=busy)
                    yield figures(name, call)
        yield check("aliases of a chunk agree", partial(aliases, place, device, area))
        yield check("a range is read where it is mapped", partial(in_part, place, device, area))
        yield check("twice the memory can be reserved", partial(reserved, place, device))
    finally:
        place.wait()
        device.close()


def commit(device: ChunkDevice, count: int) -> Row:
    """Time chunks that get their memory."""
    begin = time.perf_counter()
    device.commit(_numbers(0, count))
    return _row("commit", count, (time.perf_counter() - begin) / count)


def mapped(
    place: Place, device: ChunkDevice, area: AddressRange, count: int, *, apart: bool, busy: bool
) -> Row:
    """Time mapping chunks and undoing it.

    :param apart: at every second position, so that each needs an access of its own.
    :param busy: while a kernel runs that does not use them; ``ran_beside`` says whether it still
        ran afterwards.
    """
    positions = _numbers(0, count) * (1 + apart)
    calls: tuple[Callable[[], object], ...] = (
        lambda: device.map(area, positions, _numbers(0, count)),
        lambda: device.unmap(area, positions),
    )
    seconds, ran_beside = [], []
    for call in calls:
        is_running = place.busy() if busy else lambda: False
        begin = time.perf_counter()
        call()
        seconds.append((time.perf_counter() - begin) / count)
        ran_beside.append(is_running())
        place.wait()
    row = _row("map", count, seconds[0]) | {"unmap_microseconds": seconds[1] * 1e6}
    return row | {"apart": apart, "busy": busy, "ran_beside": ran_beside}


def aliases(place: Place, device: ChunkDevice, area: AddressRange) -> str:
    """Write by one address and read by the other in the next kernel.

    :raises AssertionError: if a read misses what was written.
    """
    device.map(area, _numbers(0, 1), _numbers(0, 1))
    home, other = (_tensor(place, each.address, device.chunk_bytes) for each in (device.home, area))
    times = sizes_of(place.pretends).alias_writes
    wrong = torch.zeros((), dtype=torch.int64, device=place.device)
    for number in range(times):
        writer, reader = (home, other) if number % 2 else (other, home)
        writer.tensor.fill_(number % 251)
        wrong += (reader.tensor != number % 251).sum()
    missed = int(wrong)
    device.unmap(area, _numbers(0, 1))
    assert not missed, f"{missed} bytes of {times} writes were not seen"
    return f"{times} writes seen"


def in_part(place: Place, device: ChunkDevice, area: AddressRange) -> str:
    """Use a tensor over a whole range of which only one position, not the first, is mapped.

    :raises AssertionError: if it reads other bytes than its chunk's.
    """
    at, chunk = np.array([3], np.int32), _numbers(1, 1)
    device.map(area, at, chunk)
    whole = _tensor(place, area.address, area.size_bytes)
    first = 3 * device.chunk_bytes
    whole.tensor[first : first + device.chunk_bytes].fill_(7)
    seen = _tensor(place, device.home.address + device.chunk_bytes, device.chunk_bytes)
    total = int(seen.tensor.sum(dtype=torch.int64))
    device.unmap(area, at)
    assert total == 7 * device.chunk_bytes, f"the sum is {total}"
    return f"{area.num_positions} positions, one of them mapped"


def reserved(place: Place, device: ChunkDevice) -> str:
    """Reserve twice the addresses of the device's memory."""
    positions = 2 * place.memory_bytes() // device.chunk_bytes
    area = device.reserve(positions)
    return f"{area.size_bytes >> 30} GiB"


def _row(call: str, count: int, seconds: float) -> Row:
    """Return figures of one chunk of several."""
    return {"kind": "chunks", "call": call, "chunks": count, "microseconds": seconds * 1e6}


def _tensor(place: Place, address: int, size_bytes: int) -> AddressedBytes:
    return AddressedBytes(address, size_bytes, place.device)


def _numbers(first: int, count: int) -> Ints:
    return np.arange(first, first + count, dtype=np.int32)
