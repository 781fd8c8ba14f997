"""Results of cells on disk, so that an interrupted run goes on, and only with what still holds.

A result is reused only with the sources that made it: those that decide about memory, or for
vLLM its driver.  New results are kept in ``.cache/``, outside the repository; committed ones
(:mod:`bench.managers.results`) are found in any checkout.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.managers.cells import IDEAL, VLLM, Cell
from bench.managers.results import read

CACHE = Path(".cache", "managers")
CONFIG = "bench/configs/{shape}.json"
SCHEDULING = (
    "src/kvell/pages/*.py",
    "src/kvell/memory.py",
    "src/kvell/engine/core/core.py",
    "src/kvell/engine/core/entering.py",
    "src/kvell/engine/core/yields.py",
    "src/kvell/engine/requests/limits.py",
    "src/kvell/engine/planning/plan_draft.py",
    "src/kvell/engine/planning/admission.py",
    "src/kvell/engine/planning/chunks.py",
    "src/kvell/engine/planning/protected.py",
    "src/kvell/engine/planning/scheduler.py",
    "src/kvell/engine/planning/seats.py",
    "src/kvell/simulator/traces/prompts.py",
    "src/kvell/simulator/replay/replay.py",
    "src/kvell/simulator/report/metrics.py",
    "bench/managers/ours.py",
    CONFIG,
)
DECIDING = (*SCHEDULING, "src/kvell/prefix/**/*.py", "csrc/memory/*")
"""Sources that a cell of ours depends on."""
PACKING = (*SCHEDULING, "bench/managers/bound.py", "bench/replay/ideal.py")
"""Sources that a cell of the packer without pages depends on."""
DRIVING = ("bench/managers/peer/*.py", "bench/managers/environment.py", CONFIG)
"""Sources that a cell of vLLM's depends on."""


def depends_on(manager: str) -> tuple[str, ...]:
    """Patterns of the files that decide about a manager's cells."""
    if manager in VLLM:
        return DRIVING
    return PACKING if manager == IDEAL else DECIDING


def fingerprint(root: Path, patterns: Iterable[str]) -> str:
    """Changes with the name or content of any of the files."""
    seen = hashlib.sha256()
    for path in sorted(path for pattern in patterns for path in root.glob(pattern)):
        seen.update(str(path.relative_to(root)).encode() + b"\0")
        seen.update(hashlib.sha256(path.read_bytes()).digest())
    return seen.hexdigest()[:12]


class Store:
    """One file for each cell, and a committed one for many.

    :param requests: an override of the number of requests, part of a cell's identity.
    :param committed: a file of results, used where the cache has none.
    """

    def __init__(
        self,
        root: Path,
        cache: Path = CACHE,
        requests: int | None = None,
        committed: Path | None = None,
    ) -> None:
        self._root = root
        self._directory = cache / (f"first-{requests}" if requests else "whole")
        self._committed = read(committed) if committed else {}
        self._sources: dict[tuple[Sequence[str], str], str] = {}

    def sources(self, cell: Cell) -> str:
        """Fingerprint of what decides about a cell now."""
        which = depends_on(cell.manager), cell.shape
        if which not in self._sources:
            patterns = (one.format(shape=cell.shape) for one in which[0])
            self._sources[which] = fingerprint(self._root, patterns)
        return self._sources[which]

    def path(self, cell: Cell) -> Path:
        """The path of a cell's result, existing or not."""
        return self._directory / self.sources(cell) / f"{cell.name}.json"

    def get(self, cell: Cell, memory_bytes: int | None = None) -> dict[str, Any] | None:
        """A cell's result, or None if there is none for today's sources and this memory size."""
        found = self.last(cell)
        if found is None or found["sources"] != self.sources(cell):
            return None
        return found if memory_bytes in (None, found["asked_bytes"]) else None

    def last(self, cell: Cell) -> dict[str, Any] | None:
        """A cell's last result, of today's sources or of those that it was committed with."""
        try:
            found: dict[str, Any] = json.loads(self.path(cell).read_text())
        except (OSError, ValueError):
            return self._committed.get(cell.name)
        return found | {"sources": self.sources(cell)}

    def put(self, cell: Cell, memory_bytes: int, outcome: dict[str, Any]) -> dict[str, Any]:
        """Store a result atomically; returns what :meth:`get` will."""
        path = self.path(cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = outcome | {"asked_bytes": memory_bytes}
        part = path.with_suffix(".part")
        part.write_text(json.dumps(kept))
        part.replace(path)
        return kept | {"sources": self.sources(cell)}
