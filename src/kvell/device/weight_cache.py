"""Packed weights in files: a later start copies them instead of packing them again.

A file has the pieces of one model in the order in which they were taken, and a manifest::

    │ piece │ piece │ … │ manifest, JSON │ length of the manifest │ mark │
    └ multiples of 4096 ┘                └ 8 bytes                └ 8 bytes

Pieces are copied into the memory for weights, which may have huge pages; a mapped file has none,
and decodes 5 % slower. Each chunk has a sum, which is checked as it is copied: a damaged file is
removed, and the weights are packed again.

    absent ──write──► KEY.….partial, locked ──rename──► KEY.weights ──oldest, no room──► removed

No fault of a file or a disk ends a start: it only means that nothing is cached.
"""

import atexit
import errno
import fcntl
import logging
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from threading import Event, Thread
from typing import Annotated, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvell.byte_sizes import format_bytes
from kvell.device.host import CHUNK_BYTES
from kvell.device.weight_memory import WeightMemory, WeightPiece
from kvell.vocabulary import MIB
from kvell.wire.decoding import MalformedError, decode

logger = logging.getLogger(__name__)

MARK = b"kvellw01"
LENGTH_BYTES = 8
ALIGN_BYTES = 4096
LEAST_BYTES = 16 * MIB
"""Smaller models are not written: they are packed in milliseconds."""
MOST_THREADS = 8
EXIT_SECONDS = 5.0
"""How long the end of a process waits for a file that is being written."""
WHOLE, PARTIAL = ".weights", ".partial"

Bytes = NDArray[np.uint8]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]


class _StoredPiece(msgspec.Struct, frozen=True):
    what: str
    offset_bytes: Size
    size_bytes: Size
    sums: list[int]


class _Manifest(msgspec.Struct, frozen=True):
    key: str
    pieces: list[_StoredPiece]


_MANIFEST = msgspec.json.Decoder(_Manifest)


@dataclass(frozen=True)
class _PieceData:
    what: str
    data: Bytes

    @property
    def stored_bytes(self) -> int:
        return -(-self.data.nbytes // ALIGN_BYTES) * ALIGN_BYTES


class WeightCache:
    """A directory of packed weights, which processes may share.

    :ivar found_bytes: size of all pieces that were copied from files.
    """

    def __init__(self, folder: Path, most_bytes: int, least_bytes: int = LEAST_BYTES) -> None:
        """Use a directory, which need not exist.

        :param most_bytes: bound of all files; the least recently used are removed first.
        :param least_bytes: size below which a model is not written.
        """
        self._folder, self._most_bytes, self._least_bytes = folder, most_bytes, least_bytes
        self._ends = Event()
        self._writers: list[Thread] = []
        self.found_bytes = 0

    @contextmanager
    def memory_of(self, key: str, memory: WeightMemory) -> Iterator[WeightMemory]:
        """Yield memory for a model's weights, which are loaded in the block.

        Pieces that the model's file has are filled. Otherwise a thread writes all of them after
        the block, unless it raised an error.

        :param key: identifies the model and all that decides the bytes of its pieces.
        """
        path = self._folder / (blake2b(key.encode(), digest_size=16).hexdigest() + WHOLE)
        cached = CachedMemory(memory, _StoredWeights.open(path, key))
        try:
            yield cached
        finally:
            cached.close()
            self.found_bytes += cached.found_bytes
        if cached.is_new:
            self._write_later(path, key, cached.taken)

    def wait(self) -> None:
        """Wait until all files are written."""
        for writer in self._writers:
            writer.join()

    def _write_later(self, path: Path, key: str, taken: Sequence[_PieceData]) -> None:
        size_bytes = sum(each.stored_bytes for each in taken)
        if size_bytes < self._least_bytes:
            return
        if size_bytes > self._most_bytes:
            size, most = format_bytes(size_bytes), format_bytes(self._most_bytes)
            reason = f"{size} are more than --weight-cache-size, {most}"
            logger.warning("packed weights are not cached: %s", reason)
            return
        if not self._writers:
            atexit.register(self._end)
        writer = Thread(target=self._write, args=(path, key, taken, size_bytes), daemon=True)
        self._writers.append(writer)
        writer.start()

    def _end(self) -> None:
        for writer in self._writers:
            writer.join(EXIT_SECONDS)
        self._ends.set()
        self.wait()

    def _write(self, path: Path, key: str, taken: Sequence[_PieceData], size_bytes: int) -> None:
        partial = path.with_suffix(f".{secrets.token_hex(4)}{PARTIAL}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._make_room(size_bytes)
            try:
                with partial.open("xb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX)
                    self._write_pieces(file, key, taken)
                partial.rename(path)
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            if not self._ends.is_set():
                logger.warning("packed weights are not cached in %s: %s", self._folder, error)

    def _write_pieces(self, file: BinaryIO, key: str, taken: Sequence[_PieceData]) -> None:
        pieces, offset_bytes = list[_StoredPiece](), 0
        for each in taken:
            sums = []
            for chunk in _chunks(each.data):
                if self._ends.is_set():
                    raise InterruptedError
                sums.append(_sum(chunk))
                file.write(chunk.data)
            file.write(bytes(each.stored_bytes - each.data.nbytes))
            pieces.append(_StoredPiece(each.what, offset_bytes, each.data.nbytes, sums))
            offset_bytes += each.stored_bytes
        manifest = msgspec.json.encode(_Manifest(key, pieces))
        file.write(manifest + len(manifest).to_bytes(LENGTH_BYTES, "little") + MARK)

    def _make_room(self, size_bytes: int) -> None:
        """Remove files that no process writes any more, and the oldest beyond the bound.

        :raises OSError: if the disk has less than twice the size.
        """
        for partial in self._folder.glob(f"*{PARTIAL}"):
            with suppress(OSError), partial.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                partial.unlink()
        files = []
        for path in self._folder.glob(f"*{WHOLE}"):
            with suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        stored_bytes = sum(file_bytes for _, file_bytes, _ in files)
        for _, file_bytes, path in sorted(files):
            if stored_bytes + size_bytes <= self._most_bytes:
                break
            path.unlink(missing_ok=True)
            stored_bytes -= file_bytes
        if shutil.disk_usage(self._folder).free < 2 * size_bytes:
            raise OSError(errno.ENOSPC, f"{format_bytes(size_bytes)} are over half of what is free")


class CachedMemory:
    """Memory for weights, of which a file may have the contents.

    :ivar uncached: the memory itself.
    :ivar taken: all pieces so far.
    :ivar is_new: whether one of them was neither in the memory nor in the file.
    """

    def __init__(self, memory: WeightMemory, stored: "_StoredWeights | None") -> None:
        self.uncached, self.is_shared = memory, memory.is_shared
        self._stored = stored
        self.taken: list[_PieceData] = []
        self.is_new = False
        self.found_bytes = 0

    def take(self, what: str, size_bytes: int) -> WeightPiece:
        piece = self.uncached.take(what, size_bytes)
        data = np.frombuffer(piece.memory, np.uint8)[:size_bytes]
        self.taken.append(_PieceData(what, data))
        if piece.is_filled:
            return piece
        if self._stored is not None and self._stored.copy_next(what, data):
            self.found_bytes += size_bytes
            return WeightPiece(piece.memory, is_filled=True)
        self.close()
        self.is_new = True
        return piece

    def close(self) -> None:
        if self._stored is not None:
            self._stored.file.close()
            self._stored = None


class _StoredWeights:
    """A file of packed weights, opened."""

    def __init__(self, path: Path, file: BinaryIO, pieces: Sequence[_StoredPiece]) -> None:
        self._path, self.file = path, file
        self._pieces = list(pieces)

    @classmethod
    def open(cls, path: Path, key: str) -> "_StoredWeights | None":
        try:
            file = path.open("rb", buffering=0)
        except OSError:
            return None
        try:
            manifest = _manifest(file.fileno())
            if manifest.key != key:
                raise MalformedError("it is another model's")
        except (MalformedError, OSError) as error:
            file.close()
            _remove(path, error)
            return None
        with suppress(OSError):
            os.utime(path)  # its last use
        return cls(path, file, manifest.pieces)

    def copy_next(self, what: str, data: Bytes) -> bool:
        """Copy the next piece; return False, and remove the file, if it has another or is damaged.

        :param data: uint8 [bytes]; its contents are undefined if the piece is not there.
        """
        piece = self._pieces.pop(0) if self._pieces else None
        count = -(-data.nbytes // CHUNK_BYTES)
        layout = None if piece is None else (piece.what, piece.size_bytes, len(piece.sums))
        if piece is None or layout != (what, data.nbytes, count):
            _remove(self._path, "its pieces are others")
            return False
        offset_bytes = piece.offset_bytes
        descriptor = self.file.fileno()

        def copy(part: tuple[int, Bytes, int]) -> bool:
            index, chunk, expected = part
            read_bytes = os.preadv(descriptor, [chunk.data], offset_bytes + index * CHUNK_BYTES)
            return read_bytes == chunk.nbytes and _sum(chunk) == expected

        parts = zip(range(count), _chunks(data), piece.sums, strict=True)
        threads = min(len(os.sched_getaffinity(0)), MOST_THREADS)
        try:
            with ThreadPoolExecutor(threads) as pool:
                if all(pool.map(copy, parts)):
                    return True
            problem: object = "a chunk has another sum"
        except OSError as error:
            problem = error
        _remove(self._path, problem)
        return False


def _manifest(descriptor: int) -> _Manifest:
    """Read the manifest at the end of a file.

    :raises MalformedError: if there is none.
    """
    end_bytes = os.fstat(descriptor).st_size - LENGTH_BYTES - len(MARK)
    last = os.pread(descriptor, LENGTH_BYTES + len(MARK), max(end_bytes, 0))
    size_bytes = int.from_bytes(last[:LENGTH_BYTES], "little")
    if last[LENGTH_BYTES:] != MARK or size_bytes > end_bytes:
        raise MalformedError("it is cut")
    return decode(_MANIFEST, os.pread(descriptor, size_bytes, end_bytes - size_bytes))


def _remove(path: Path, problem: object) -> None:
    logger.warning("packed weights %s cannot be used, and are packed again: %s", path, problem)
    with suppress(OSError):
        path.unlink()


def _chunks(data: Bytes) -> Iterator[Bytes]:
    return (data[at : at + CHUNK_BYTES] for at in range(0, data.nbytes, CHUNK_BYTES))


def _sum(chunk: Bytes) -> int:
    """Return a sum, 64 bits, that differs if a byte or the order of 4-KiB blocks does."""
    whole = chunk.nbytes // ALIGN_BYTES * ALIGN_BYTES
    blocks = chunk[:whole].view(np.uint64).reshape(-1, ALIGN_BYTES // 8).sum(1, dtype=np.uint64)
    odd = np.arange(1, 2 * len(blocks), 2, dtype=np.uint64)
    return (int((blocks * odd).sum(dtype=np.uint64)) + zlib.crc32(chunk[whole:].data)) % (1 << 64)
