"""The system calls of ``csrc/device`` through ctypes, the oracle of the compiled ones.

Same names, arguments and results as :mod:`kvell.device._host`, at about 6 µs more per call. Both
are for Linux only.
"""

import ctypes
import mmap

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_FAILED = ctypes.c_void_p(-1).value
_FIXED = 0x10
_NORESERVE = 0x4000
_SMALL_PAGE = 4096
_BARE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
_POPULATE_WRITE = 23
_COLLAPSE = 25


def reserve(size_bytes: int, alignment: int) -> tuple[int, int]:
    """Reserve an aligned range of addresses without memory."""
    raw = _LIBC.mmap(None, size_bytes + alignment, 0, _BARE, -1, 0)
    if raw == _FAILED:
        return 0, ctypes.get_errno()
    start = -(-raw // alignment) * alignment
    if start > raw:
        _LIBC.munmap(raw, start - raw)
    if start < raw + alignment:
        _LIBC.munmap(start + size_bytes, raw + alignment - start)
    return start, 0


def release(address: int, size_bytes: int) -> int:
    return ctypes.get_errno() if _LIBC.munmap(address, size_bytes) else 0


def map_chunks(
    address: int,
    descriptor: int,
    chunk_bytes: int,
    positions: int,
    chunks: int,
    count: int,
    populate: bool,
) -> tuple[int, int]:
    to, source = _ints(positions, count), _ints(chunks, count)
    both, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED
    done = 0
    while done < count:
        run = _run_length(to, source, done)
        where, size = address + chunk_bytes * to[done], chunk_bytes * run
        if _LIBC.mmap(where, size, both, flags, descriptor, chunk_bytes * source[done]) == _FAILED:
            return done, ctypes.get_errno()
        if populate:
            _LIBC.madvise(where, size, _POPULATE_WRITE)
        done += run
    return done, 0


def map_readable(address: int, descriptor: int, size_bytes: int) -> int:
    """Map the whole of another process's file read-only at an address."""
    flags = mmap.MAP_SHARED | _FIXED
    if _LIBC.mmap(address, size_bytes, mmap.PROT_READ, flags, descriptor, 0) == _FAILED:
        return ctypes.get_errno()
    return 0


def unmap_range(address: int, size_bytes: int) -> int:
    if _LIBC.mmap(address, size_bytes, 0, _BARE | _FIXED, -1, 0) == _FAILED:
        return ctypes.get_errno()
    return 0


def unmap_chunks(address: int, chunk_bytes: int, positions: int, count: int) -> tuple[int, int]:
    """Unmap positions, run by run; they stay reserved."""
    which = _ints(positions, count)
    done = 0
    while done < count:
        run = _run_length(which, which, done)
        where, size = address + chunk_bytes * which[done], chunk_bytes * run
        if _LIBC.mmap(where, size, 0, _BARE | _FIXED, -1, 0) == _FAILED:
            return done, ctypes.get_errno()
        done += run
    return done, 0


def commit_chunks(
    address: int, chunk_bytes: int, positions: int, count: int
) -> tuple[int, int, int]:
    """Give memory to mapped positions, in huge pages if the system can."""
    huge = 0
    for done, position in enumerate(_ints(positions, count)):
        where = address + chunk_bytes * position
        # The system does not collapse an empty range, so a small page is touched first.
        if _LIBC.madvise(where, _SMALL_PAGE, _POPULATE_WRITE):
            return done, huge, ctypes.get_errno()
        if not _LIBC.madvise(where, chunk_bytes, _COLLAPSE):
            huge += 1
        elif _LIBC.madvise(where, chunk_bytes, _POPULATE_WRITE):
            return done, huge, ctypes.get_errno()
    return count, huge, 0


def _ints(address: int, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(address)) if count else []


def _run_length(a: list[int], b: list[int], start: int) -> int:
    length = 1
    while start + length < len(a) and (
        a[start + length] == a[start] + length and b[start + length] == b[start] + length
    ):
        length += 1
    return length
