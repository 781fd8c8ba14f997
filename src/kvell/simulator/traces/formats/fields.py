"""Checked fields of one request of a trace; every error names file, line and field."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeGuard

import numpy as np

from kvell.errors import ChangeSomething
from kvell.simulator.traces.rows import NO_IDS, BlockIds
from kvell.wire.decoding import MalformedError, decode_json, has_more_values

MOST_TOKENS = (1 << 31) - 1
MOST_SECONDS = 1e10
"""Three centuries: sums and means of such times stay finite, and microseconds apart."""
LARGEST_ID = (1 << 63) - 1
ID_VALUES = 1 << 64
ID_HEX_DIGITS = 16
MOST_HEX_DIGITS = 128
HEX = re.compile(rf"(0[xX])?[0-9a-fA-F]{{1,{MOST_HEX_DIGITS}}}")
MOST_NAMED = 12
"""The most names of fields that an error lists."""
MOST_VALUES = 1 << 17
"""The most lists, objects and fields of one line; numbers in a list are not counted."""
LONGEST_VALUE = 64
"""Characters of a wrong value that an error shows."""


@dataclass(frozen=True)
class Fields:
    """One object of a trace, or an object inside it.

    :param place: file and line.
    :param within: path of the object inside that line, such as ``images[0].``.
    """

    place: str
    raw: Mapping[str, Any]
    within: str = ""

    def seconds(self, name: str, unit: float = 1.0) -> float:
        """Return a time in seconds.

        :param unit: seconds in which the field counts.
        """
        value = self.raw.get(name)
        if not _is_number(value) or not value >= 0:  # NaN is not at least 0
            raise self.wrong(name, f"is {show(value)}, not a number of at least 0")
        if value > MOST_SECONDS / unit:
            raise self.wrong(name, f"is {show(value)}, above {MOST_SECONDS / unit:g}")
        return float(value) * unit

    def whole_number(self, name: str, low: int = 1, high: int = MOST_TOKENS) -> int:
        value = self.raw.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.wrong(name, f"is {show(value)}, not a whole number of at least {low}")
        if value > high:
            raise self.wrong(name, f"is {show(value)}, above {high}")
        return value

    def flag(self, name: str) -> bool | None:
        value = self.raw.get(name)
        if not isinstance(value, bool | None):
            raise self.wrong(name, f"is {show(value)}, neither true nor false")
        return value

    def optional_text(self, name: str) -> str | None:
        value = self.raw.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, f"is {show(value)}, not text")
        return value

    def objects(self, name: str) -> list["Fields"]:
        listed = self.raw.get(name) or []
        if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            raise self.wrong(name, "is not a list of objects")
        return [
            Fields(self.place, each, f"{self.within}{name}[{number}].")
            for number, each in enumerate(listed)
        ]

    def block_ids(self, name: str) -> BlockIds:
        """Return ids of blocks, int64 [blocks]; none if they are missing.

        Hexadecimal texts are ids, too: the number that they are, or a digest of a longer one.
        """
        values = self.raw.get(name)
        if values is None or values == []:
            return NO_IDS
        listed: list[Any] = values if isinstance(values, list) else [None]
        if all(type(value) is int and -LARGEST_ID <= value < ID_VALUES for value in listed):
            return np.array([_signed(value) for value in listed], np.int64)
        if all(isinstance(value, str) and HEX.fullmatch(value) for value in listed):
            return np.array([_hex_id(value) for value in listed], np.int64)
        problem = "is not a list of whole numbers of 64 bits, or of hexadecimal texts"
        raise self.wrong(name, f"{problem} of at most {MOST_HEX_DIGITS} digits")

    def check_blocks(self, name: str, ids: BlockIds, prompt_tokens: int, size: int) -> None:
        """Refuse ids of more blocks than the prompt has."""
        most = -(-prompt_tokens // max(1, size))
        if len(ids) > most:
            problem = (
                f"are {len(ids)}, more than the prompt of {prompt_tokens} tokens has blocks of "
                f"{size}: {most}"
            )
            remedy = "repair that line, or give the tokens of a block with --block-tokens"
            raise wrong(self.place, self.within + name, problem, remedy)

    def wrong(self, name: str, problem: str) -> ChangeSomething:
        return wrong(self.place, self.within + name, problem)


def wrong(place: str, name: str, problem: str, remedy: str = "repair that line") -> ChangeSomething:
    return ChangeSomething("--trace", place, f"{name} {problem}", remedy)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _signed(value: int) -> int:
    """Return the int64 with the same bits as an unsigned number of 64 bits."""
    return value if value <= LARGEST_ID else value - ID_VALUES


def _hex_id(text: str) -> int:
    digits = text.lower().removeprefix("0x").lstrip("0") or "0"
    if len(digits) > ID_HEX_DIGITS:
        digits = blake2b(digits.encode(), digest_size=8).hexdigest()
    return _signed(int(digits, 16))


def parsed_object(place: str, line: str) -> dict[str, Any]:
    if has_more_values(line, MOST_VALUES):
        raise wrong(place, "line", f"has more than {MOST_VALUES} values")
    try:
        raw = decode_json(line)
    except MalformedError as error:
        raise wrong(place, "line", f"is not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise wrong(place, "line", "is not a JSON object")
    return raw


def name_list(names: Sequence[str]) -> str:
    more = [f"{len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    return ", ".join([*(name[:LONGEST_VALUE] for name in names[:MOST_NAMED]), *more])


def show(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > LONGEST_VALUE:
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "…"
