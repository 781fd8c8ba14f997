"""Result files: where they are kept, and the run that each of them records.

One current file for each bench and machine: ``bench/results/MACHINE/NAME.json``.  Results in
virtual time do not depend on the machine and are kept in ``bench/results/virtual``.  Every file
has a ``run`` with the processor, the commit, the date and the command.  Only files of a clean tree
are committed: a commit that ends in ``-dirty`` names no sources.  No torch here.
"""

import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path("bench", "results")
VIRTUAL = "virtual"
"""Folder and processor of results that are computed instead of timed."""
FIELDS = ("processor", "commit", "date", "command")
"""Fields of ``run``."""
CPUINFO = Path("/proc/cpuinfo")
REPOSITORY = Path(__file__).resolve().parents[1]

Facts = Mapping[str, str]
"""Fields of one processor in ``/proc/cpuinfo``."""


def path_of(name: str, machine: str | None = None) -> Path:
    """Where a bench keeps its figures; ``machine`` defaults to :func:`slug` of this one."""
    return RESULTS / (machine or slug(processor_facts())) / f"{name}.json"


def write(
    path: Path, figures: Mapping[str, Any] | Sequence[Any], *, processor: str | None = None
) -> None:
    """Write figures as JSON, with their ``run``; a list goes under ``figures``.

    :param processor: :data:`VIRTUAL`, or a GPU; this machine's CPU by default.
    """
    told = figures if isinstance(figures, Mapping) else {"figures": figures}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(compact({"run": run(processor), **told}), encoding="utf-8")


class RowFile:
    """Rows as they come: JSON lines, the first of which is the ``run``.

    Each row is in the file once it is added, whatever happens to the process later.
    """

    def __init__(self, path: Path, *, processor: str | None = None) -> None:
        """:param processor: as in :func:`write`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        path.write_text(_line({"run": run(processor)}), encoding="utf-8")

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(row))


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, separators=(",", ":"), ensure_ascii=False) + "\n"


def read(path: Path) -> dict[str, Any]:
    """Read a result file; the rows of a :class:`RowFile` are below ``rows``."""
    text = path.read_text(encoding="utf-8")
    first, _, others = text.partition("\n")
    if not first.startswith('{"run":{') or not first.endswith("}}"):
        whole: dict[str, Any] = json.loads(text)
        return whole
    return {**json.loads(first), "rows": [json.loads(line) for line in others.splitlines()]}


def compact(told: Mapping[str, Any]) -> str:
    """JSON with one line for each field of the outermost object."""
    fields = (
        f"{json.dumps(name)}:{json.dumps(value, separators=(',', ':'), ensure_ascii=False)}"
        for name, value in told.items()
    )
    return "{" + ",\n".join(fields) + "}\n"


def run(processor: str | None = None) -> dict[str, str | None]:
    """Processor, commit, date and command of this process."""
    return {
        "processor": processor or processor_name(processor_facts()),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
    }


def processor_facts() -> dict[str, str]:
    """The first processor of ``/proc/cpuinfo``; empty where there is no such file."""
    try:
        first = CPUINFO.read_text().split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def processor_name(facts: Facts) -> str:
    """Model name, family and model; a hypervisor may hide all but the last two."""
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    family, model = facts.get("cpu family"), facts.get("model")
    return f"{facts['model name']} (family {family}, model {model})"


def slug(facts: Facts) -> str:
    """A machine's folder: the generation of an AMD processor, or whether an Intel one has AMX."""
    flags = facts.get("flags", "").split()
    if facts.get("vendor_id") == "AuthenticAMD" and facts.get("cpu family") in ("25", "26"):
        return _zen(int(facts["cpu family"]), int(facts["model"]))
    if facts.get("vendor_id") == "GenuineIntel" and "avx512f" in flags:
        return "amx" if "amx_tile" in flags else "xeon"
    named = facts.get("model name") or platform.machine()
    return re.sub(r"[^a-z0-9]+", "_", named.lower()).strip("_")


def _zen(family: int, model: int) -> str:
    if family == 26:
        return "zen5"
    is_zen4 = 0x10 <= model <= 0x1F or 0x60 <= model <= 0x7F or 0xA0 <= model <= 0xAF
    return "zen4" if is_zen4 else "zen3"


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.strip()
