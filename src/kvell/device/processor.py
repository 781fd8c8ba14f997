"""What the machine's processor is, as far as it decides how fast kernels are."""

import platform
from dataclasses import dataclass
from pathlib import Path

TELLING = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "sve")
"""Features that kernels and libraries choose by."""


@dataclass(frozen=True)
class Processor:
    """A processor's name, and which of :data:`TELLING` it has."""

    name: str
    features: tuple[str, ...]


def processor(root: Path = Path("/")) -> Processor:
    """This machine's processor; what the system does not tell is left open.

    :param root: where ``proc`` lies.
    """
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip().lower(), value.strip())
    # Hypervisors hide a model's name behind its maker's; its numbers tell it all the same.
    parts = [found.get("model name") or platform.machine()]
    numbers = [found[key] for key in ("cpu family", "model", "stepping") if key in found]
    if numbers:
        parts.append(f"({'.'.join(numbers)})")
    flags = set((found.get("flags") or found.get("features") or "").split())
    return Processor(" ".join(parts), tuple(name for name in TELLING if name in flags))
