"""Parser and formatters of sizes such as ``512MiB`` and ``1.5GiB``, and of counts like ``8k``."""

import re
from fractions import Fraction

from kvell.errors import ChangeSomething

_UNITS = {"B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_BY_NAME = {name.lower(): factor for name, factor in _UNITS.items()}
_COUNTS = {"": 1} | {
    unit: base**power
    for power, (small, large) in enumerate((("k", "K"), ("m", "M"), ("g", "G")), start=1)
    for unit, base in ((small, 1000), (large, 1024))
}
_COUNT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([kKmMgG]?)")
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[a-zA-Z]*)")


def parse_bytes(text: str, field: str) -> int:
    """Return a size in bytes; a number without a unit is bytes, and case is ignored.

    :raises ChangeSomething: with ``field`` if the text is not a size or not positive.
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _BY_NAME.get(match["unit"].lower() or "b") if match else None
    if match is None or factor is None:
        raise ChangeSomething(field, text, "is not a size", "write it like 512MiB or 24GB")
    size_bytes = int(float(match["number"]) * factor)
    if size_bytes <= 0:
        raise ChangeSomething(field, text, "must be more than zero", "write it like 512MiB")
    return size_bytes


def parse_count(text: str) -> int | None:
    """Return a count such as ``8192``, ``8k`` (8000), ``8K`` (8192) or ``1.5k``; None for others.

    Units are those of vLLM: small letters are powers of 1000, capitals of 1024.
    """
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        return None
    count = Fraction(match[1]) * _COUNTS[match[2]]
    return int(count) if count.denominator == 1 else None


def format_bytes(size_bytes: int) -> str:
    """Return a size in binary units: exact below 1 KiB, else with three digits or more."""
    value = float(size_bytes)
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1023.5:
            break
        value = value / 1024
        unit = larger
    digits = 0 if unit == "B" or value >= 100 or value == int(value) else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def typed_bytes(size_bytes: int) -> str:
    """Return a size as a user would type it: exact, and as short as possible, like ``1.5GiB``."""
    texts = [f"{size_bytes}B"]
    for unit, factor in _UNITS.items():
        number = f"{size_bytes / factor:g}"
        if "e" not in number and float(number) * factor == size_bytes:
            texts.append(number + unit)
    return min(texts, key=lambda text: (len(text), "." in text))
