"""The cost of mapping, touching and reading a 2 MiB chunk of host memory, small pages or huge.

See README.md beside this file.  The range is a memfd, as the pool of the engine is.
"""

import argparse
import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench import result_file
from kvell.vocabulary import KIB, MIB

CHUNK_BYTES = 2 * MIB
SMALL_PAGE_BYTES = 4 * KIB
PIECE_BYTES = 16 * KIB
"""About what attention reads at once: one layer of one page."""
CACHED_PIECES = 16
MADV_COLLAPSE = 25
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
FAILED = ctypes.c_void_p(-1).value

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Figure:
    """One figure over all rounds.

    A round's sample is the median over its chunks: interruptions hit only a few of them.
    """

    name: str
    unit: str
    best: float
    median: float


class Range:
    """A 2 MiB-aligned reservation and a memfd that is mapped into it chunk by chunk."""

    def __init__(self, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self.size_bytes = num_chunks * CHUNK_BYTES
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        base = _mmap(None, self.size_bytes + CHUNK_BYTES, 0, private, -1, 0)
        self._reserved = base, self.size_bytes + CHUNK_BYTES
        self.start = -(-base // CHUNK_BYTES) * CHUNK_BYTES
        self.descriptor = os.memfd_create("bench")
        os.ftruncate(self.descriptor, self.size_bytes)

    def map(self, chunk: int) -> None:
        """Map a chunk at its own address."""
        flags = mmap.MAP_SHARED | MAP_FIXED
        offset = chunk * CHUNK_BYTES
        both = mmap.PROT_READ | mmap.PROT_WRITE
        _mmap(self.start + offset, CHUNK_BYTES, both, flags, self.descriptor, offset)

    def unmap(self, chunk: int) -> None:
        """Restore the bare reservation."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
        _mmap(self.start + chunk * CHUNK_BYTES, CHUNK_BYTES, 0, flags, -1, 0)

    def touch(self, chunk: int) -> None:
        """Write one byte in every small page of a chunk."""
        first = chunk * CHUNK_BYTES
        self.view()[first : first + CHUNK_BYTES : SMALL_PAGE_BYTES] = 1

    def collapse(self, chunk: int) -> None:
        """Make one huge page of the small pages of a chunk (Linux 6.1, no privileges).

        :raises OSError: where the system cannot.
        """
        if LIBC.madvise(self.start + chunk * CHUNK_BYTES, CHUNK_BYTES, MADV_COLLAPSE):
            raise OSError(ctypes.get_errno(), "MADV_COLLAPSE")

    def view(self) -> Bytes:
        """The whole range, uint8."""
        raw = (ctypes.c_uint8 * self.size_bytes).from_address(self.start)
        return np.ctypeslib.as_array(raw)

    def close(self) -> None:
        """Release all memory."""
        LIBC.munmap(ctypes.c_void_p(self._reserved[0]), ctypes.c_size_t(self._reserved[1]))
        os.close(self.descriptor)


def _mmap(
    address: int | None, size: int, protection: int, flags: int, descriptor: int, offset: int
) -> int:
    got = LIBC.mmap(address, size, protection, flags, descriptor, offset)
    if got == FAILED or got is None:
        raise OSError(ctypes.get_errno(), "mmap")
    return int(got)


def per_chunk_us(area: Range, call: Callable[[int], None]) -> float:
    """Microseconds of a call, the median over the chunks."""
    return _median_seconds(range(area.num_chunks), call) * 1e6


def read_gb_per_second(area: Range, order: npt.NDArray[np.intp]) -> float:
    """Read the whole range in pieces, in the given order, into a buffer that stays in cache."""
    pieces = area.view().view(np.uint64).reshape(-1, PIECE_BYTES // 8)
    buffer = np.empty((CACHED_PIECES, PIECE_BYTES // 8), np.uint64)

    def read(first: int) -> None:
        np.take(pieces, order[first : first + CACHED_PIECES], axis=0, out=buffer, mode="clip")

    return buffer.nbytes / _median_seconds(range(0, len(order), CACHED_PIECES), read) / 1e9


def _median_seconds(items: Iterable[int], call: Callable[[int], None]) -> float:
    seconds = []
    for item in items:
        begin = time.perf_counter()
        call(item)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def one_round(num_chunks: int, *, seed: int) -> dict[str, float]:
    """Measure every figure once over a fresh memfd: small pages, then collapsed ones."""
    area = Range(num_chunks)
    try:
        found = {"map, first time": per_chunk_us(area, area.map)}
        found["first touch"] = per_chunk_us(area, area.touch)
        found |= _lives(area, "4 KiB pages", seed)
        found["collapse, once"] = per_chunk_us(area, area.collapse)
        found |= _lives(area, "huge pages", seed)
        return found
    finally:
        area.close()


def _lives(area: Range, pages: str, seed: int) -> dict[str, float]:
    """Map chunks again at addresses that had others, and read through them."""
    in_order = np.arange(area.size_bytes // PIECE_BYTES)
    shuffled = np.random.default_rng(seed).permutation(in_order)
    return {
        f"unmap, {pages}": per_chunk_us(area, area.unmap),
        f"map again, {pages}": per_chunk_us(area, area.map),
        f"touch again, {pages}": per_chunk_us(area, area.touch),
        f"read in order, {pages}": read_gb_per_second(area, in_order),
        f"read shuffled, {pages}": read_gb_per_second(area, shuffled),
    }


def empty_call_us(calls: int = 1000) -> float:
    """Microseconds of an empty system call through ctypes: the overhead of every call above."""
    return _median_seconds(range(calls), lambda _: LIBC.getppid()) * 1e6


def figures(rounds: list[dict[str, float]]) -> list[Figure]:
    """Best and median of the rounds; the best is the largest value where more is better."""
    result = []
    for name in rounds[0]:
        samples = [found[name] for found in rounds]
        fast = "read" in name
        best = max(samples) if fast else min(samples)
        unit = "GB/s" if fast else "us/chunk"
        result.append(Figure(name, unit, best, statistics.median(samples)))
    return result


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=128, help="chunks of 2 MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    return parser.parse_args()


def main() -> None:
    """Print best and median of all rounds."""
    args = arguments()
    call_us = empty_call_us()
    found = figures([one_round(args.chunks, seed=n) for n in range(args.rounds)])
    print(f"{args.chunks} chunks, {args.rounds} rounds; an empty call costs {call_us:.2f} us")
    print(f"{'':28} {'best':>9} {'median':>9}")
    for figure in found:
        print(f"{figure.name:28} {figure.best:9.1f} {figure.median:9.1f} {figure.unit}")
    if args.json:
        result = {"chunks": args.chunks, "figures": [asdict(figure) for figure in found]}
        result_file.write(args.json, result)


if __name__ == "__main__":
    main()
