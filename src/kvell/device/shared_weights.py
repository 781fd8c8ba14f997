"""Weights that several processes of a host have in memory once, in a memory file (memfd).

The first process locks the file, writes a model's weights into it and then records their positions
in a manifest. Later processes map them read-only.

    ┌ 2 MiB: manifest ──────────────────┬ model ─────────────┬ draft model ───────┐
    │ length, JSON │ length, JSON │ 0 … │ piece │ piece │ …  │ piece │ …          │
    └───────────────────────────────────┴────────────────────┴────────────────────┘

An entry's length is written last, so an entry is complete or absent. A process that dies before
leaves an unlocked file (record locks die with their process), and the next one writes after the
last complete entry.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from kvell.device.host import CHUNK_BYTES
from kvell.device.weight_memory import (
    PrivateWeights,
    WeightMemory,
    WeightPiece,
    map_file,
    protect,
)
from kvell.errors import ChangeSomething
from kvell.wire.decoding import decode_json

MANIFEST_BYTES = CHUNK_BYTES
LENGTH_BYTES = 8


@dataclass(frozen=True)
class PieceEntry:
    """A piece's position in the file."""

    what: str
    offset_bytes: int
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + max(-(-self.size_bytes // CHUNK_BYTES), 1) * CHUNK_BYTES


@dataclass(frozen=True)
class ModelEntry:
    """A model's weights in the file.

    :param key: identifies the model and all settings that decide the layout of its weights.
    """

    key: str
    pieces: tuple[PieceEntry, ...]


class SharedWeights:
    """A memory file of weights; it may hold several models, one after another.

    Locks separate processes, not threads: a process loads one model at a time.
    """

    def __init__(self, descriptor: int) -> None:
        """Take a descriptor of a memfd, empty or shared with other processes; it stays open.

        No other descriptor of the file may be closed in this process while it loads weights:
        that would free its lock.

        :raises ChangeSomething: if it is no descriptor of a file.
        """
        self._descriptor = descriptor
        try:
            os.pread(descriptor, LENGTH_BYTES, 0)
        except OSError as error:
            raise ChangeSomething(
                "--weights-fd",
                descriptor,
                f"cannot be read ({error.strerror})",
                "give the descriptor of a memfd, or leave it out",
            ) from error

    @contextmanager
    def memory_of(self, key: str) -> Iterator[WeightMemory]:
        """Yield the memory for a model's weights, which are loaded in the block.

        The file has them already, or this process writes them while others wait. If the file has
        them in another layout than this process needs, it gets private memory. An error in the
        block leaves the file as it was.
        """
        entry = self._found(key) or (yield from self._written(key))
        if entry is not None:
            yield _Mapped(self._descriptor, entry)

    def entries(self) -> list[ModelEntry]:
        return self._entries()[0]

    def _written(self, key: str) -> Any:
        """Load under the lock, unless another process did so before; return its entry then."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            entry = self._found(key)
            if entry is None:
                entries, at_bytes = self._entries()
                ends = [piece.end_bytes for model in entries for piece in model.pieces]
                memory = _Writable(self._descriptor, max(ends, default=MANIFEST_BYTES))
                yield memory
                self._append(ModelEntry(key, memory.finish()), at_bytes)
            return entry
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def _found(self, key: str) -> ModelEntry | None:
        return next((entry for entry in self.entries() if entry.key == key), None)

    def _entries(self) -> tuple[list[ModelEntry], int]:
        entries, at_bytes = [], 0
        while length := int.from_bytes(self._read(LENGTH_BYTES, at_bytes), "little"):
            fields = decode_json(self._read(length, at_bytes + LENGTH_BYTES))
            pieces = tuple(PieceEntry(**piece) for piece in fields["pieces"])
            entries.append(ModelEntry(fields["key"], pieces))
            at_bytes += LENGTH_BYTES + -(-length // LENGTH_BYTES) * LENGTH_BYTES
        return entries, at_bytes

    def _append(self, entry: ModelEntry, at_bytes: int) -> None:
        text = json.dumps(asdict(entry)).encode()
        if at_bytes + len(text) + 2 * LENGTH_BYTES > MANIFEST_BYTES:
            raise ValueError("the manifest of shared weights is full")
        os.pwrite(self._descriptor, text, at_bytes + LENGTH_BYTES)
        os.pwrite(self._descriptor, len(text).to_bytes(LENGTH_BYTES, "little"), at_bytes)

    def _read(self, size_bytes: int, at_bytes: int) -> bytes:
        return os.pread(self._descriptor, size_bytes, at_bytes)


class _Writable:
    is_shared = True

    def __init__(self, descriptor: int, start_bytes: int) -> None:
        self._descriptor, self._end_bytes = descriptor, start_bytes
        self._pieces: list[PieceEntry] = []
        self._mapped: list[Any] = []
        os.ftruncate(descriptor, start_bytes)  # removes an incomplete entry of a dead process

    def take(self, what: str, size_bytes: int) -> WeightPiece:
        entry = PieceEntry(what, self._end_bytes, size_bytes)
        os.ftruncate(self._descriptor, entry.end_bytes)
        mapped = map_file(self._descriptor, entry.offset_bytes, size_bytes, fill=True)
        self._pieces.append(entry)
        self._mapped.append(mapped)
        self._end_bytes = entry.end_bytes
        return WeightPiece(mapped)

    def finish(self) -> tuple[PieceEntry, ...]:
        for mapped in self._mapped:
            protect(mapped)
        return tuple(self._pieces)


class _Mapped:
    is_shared = True

    def __init__(self, descriptor: int, entry: ModelEntry) -> None:
        self._descriptor = descriptor
        self._pieces = list(entry.pieces)

    def take(self, what: str, size_bytes: int) -> WeightPiece:
        entry = self._pieces.pop(0) if self._pieces else None
        if entry is None or (entry.what, entry.size_bytes) != (what, size_bytes):
            return PrivateWeights().take(what, size_bytes)
        mapped = map_file(self._descriptor, entry.offset_bytes, size_bytes, fill=False)
        return WeightPiece(mapped, is_filled=True)
