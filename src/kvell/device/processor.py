"""The machine's processor, as far as it decides how fast kernels are."""

import platform
from dataclasses import dataclass
from pathlib import Path

TELLING = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "sve")
"""Features that kernels and libraries choose by."""


@dataclass(frozen=True)
class Processor:
    """A processor's name, and those of :data:`TELLING` that it has."""

    name: str
    features: tuple[str, ...]


def processor(root: Path = Path("/")) -> Processor:
    """Return this machine's processor; facts that the system does not report are left out."""
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        text = ""
    entries: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        entries.setdefault(key.strip().lower(), value.strip())
    # Hypervisors replace a model's name by its maker's; the numbers still identify it.
    parts = [entries.get("model name") or platform.machine()]
    numbers = [entries[key] for key in ("cpu family", "model", "stepping") if key in entries]
    if numbers:
        parts.append(f"({'.'.join(numbers)})")
    flags = set((entries.get("flags") or entries.get("features") or "").split())
    return Processor(" ".join(parts), tuple(name for name in TELLING if name in flags))
