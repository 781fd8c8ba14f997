"""Checked fields of one request of a trace; every error names file, line and field."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from kvell.errors import ChangeSomething
from kvell.simulator.traces.rows import NO_IDS, BlockIds
from kvell.wire.decoding import MalformedError, decode_json, has_more_values

MOST_TOKENS = (1 << 31) - 1
MOST_SECONDS = 1e10
"""Three centuries: sums and means of such times stay finite, and microseconds apart."""
LARGEST_ID = (1 << 63) - 1
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
        """Return a whole number."""
        value = self.raw.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.wrong(name, f"is {show(value)}, not a whole number of at least {low}")
        if value > high:
            raise self.wrong(name, f"is {show(value)}, above {high}")
        return value

    def flag(self, name: str) -> bool | None:
        """Return true, false, or None if it is missing."""
        value = self.raw.get(name)
        if not isinstance(value, bool | None):
            raise self.wrong(name, f"is {show(value)}, neither true nor false")
        return value

    def optional_text(self, name: str) -> str | None:
        """Return a text, or None if it is missing."""
        value = self.raw.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, f"is {show(value)}, not text")
        return value

    def objects(self, name: str) -> list["Fields"]:
        """Return a list of objects; an empty one if it is missing."""
        listed = self.raw.get(name) or []
        if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            raise self.wrong(name, "is not a list of objects")
        return [
            Fields(self.place, each, f"{self.within}{name}[{number}].")
            for number, each in enumerate(listed)
        ]

    def block_ids(self, name: str) -> BlockIds:
        """Return ids of blocks, int64 [blocks]; none if they are missing."""
        values = self.raw.get(name)
        if values is None or values == []:
            return NO_IDS
        if not isinstance(values, list) or not all(map(_is_id, values)):
            raise self.wrong(name, "is not a list of whole numbers of 64 bits")
        return np.array(values, np.int64)

    def check_blocks(self, name: str, ids: BlockIds, prompt_tokens: int, size: int) -> None:
        """Refuse ids of more blocks than the prompt has.

        :param size: tokens of a block.
        """
        if len(ids) > -(-prompt_tokens // max(1, size)):
            raise self.wrong(name, "are more than the prompt has blocks")

    def wrong(self, name: str, problem: str) -> ChangeSomething:
        """Return the error of a field."""
        return wrong(self.place, self.within + name, problem)


def wrong(place: str, name: str, problem: str) -> ChangeSomething:
    """Return the error of a field at a place of the trace."""
    return ChangeSomething("--trace", place, f"{name} {problem}", "repair that line")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_id(value: object) -> bool:
    return type(value) is int and -LARGEST_ID <= value <= LARGEST_ID


def parsed_object(place: str, line: str) -> dict[str, Any]:
    """Return the JSON object that a line is."""
    if has_more_values(line, MOST_VALUES):
        raise wrong(place, "line", f"has more than {MOST_VALUES} values")
    try:
        raw = decode_json(line)
    except MalformedError as error:
        raise wrong(place, "line", f"is not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise wrong(place, "line", "is not a JSON object")
    return raw


def show(value: object) -> str:
    """Return the beginning of a wrong value, for errors."""
    if isinstance(value, int) and value.bit_length() > LONGEST_VALUE:
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "…"
