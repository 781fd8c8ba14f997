"""Results of cells on disk, so that an interrupted run goes on, and only with what still holds.

A result is found again only by the sources that made it: those that decide about memory, or
for vLLM its driver.  ``.cache/`` is not part of the repository.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.managers.cells import VLLM, Cell

CACHE = Path(".cache", "managers")
DECIDING = (
    "src/kvell/pages/*.py",
    "src/kvell/prefix/*.py",
    "src/kvell/memory.py",
    "src/kvell/engine/core.py",
    "src/kvell/engine/limits.py",
    "src/kvell/engine/plan_draft.py",
    "src/kvell/engine/protected.py",
    "src/kvell/engine/scheduler.py",
    "src/kvell/simulator/prompts.py",
    "src/kvell/simulator/replay.py",
    "src/kvell/simulator/metrics.py",
    "csrc/memory/*",
    "bench/configs/*.json",
    "bench/managers/ours.py",
)
"""What a cell of ours depends on."""
DRIVING = ("bench/managers/peer/*.py", "bench/managers/environment.py", "bench/configs/*.json")
"""What a cell of vLLM's depends on."""


def fingerprint(root: Path, patterns: Iterable[str]) -> str:
    """Changes with the name or content of any of the files."""
    seen = hashlib.sha256()
    for path in sorted(path for pattern in patterns for path in root.glob(pattern)):
        seen.update(str(path.relative_to(root)).encode() + b"\0")
        seen.update(hashlib.sha256(path.read_bytes()).digest())
    return seen.hexdigest()[:12]


class Store:
    """One file for each cell.

    :param requests: an override of the number of requests, part of a cell's identity.
    """

    def __init__(self, root: Path, cache: Path = CACHE, requests: int | None = None) -> None:
        self._ours = fingerprint(root, DECIDING)
        self._theirs = fingerprint(root, DRIVING)
        self._directory = cache / (f"first-{requests}" if requests else "whole")

    def path(self, cell: Cell) -> Path:
        """Where a cell's result lies, or will."""
        sources = self._theirs if cell.manager in VLLM else self._ours
        return self._directory / sources / f"{cell.name}.json"

    def get(self, cell: Cell, memory_bytes: int | None = None) -> dict[str, Any] | None:
        """A cell's result; None if there is none, or one of another memory size."""
        try:
            found: dict[str, Any] = json.loads(self.path(cell).read_text())
        except (OSError, ValueError):
            return None
        return found if memory_bytes in (None, found["asked_bytes"]) else None

    def put(self, cell: Cell, memory_bytes: int, outcome: dict[str, Any]) -> dict[str, Any]:
        """Keep it, in one rename; returns what :meth:`get` will."""
        path = self.path(cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = outcome | {"asked_bytes": memory_bytes}
        part = path.with_suffix(".part")
        part.write_text(json.dumps(kept))
        part.replace(path)
        return kept
