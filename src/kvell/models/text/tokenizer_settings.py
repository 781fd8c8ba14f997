"""A tokenizer's settings as JSON can express them."""

from collections.abc import Mapping, Sequence

LARGEST_INTEGER = (1 << 63) - 1
_PLACES = ("_file", "_or_path")
"""Ends of the names of settings that hold places of files on this machine."""


def plain_settings(given: Mapping[str, object]) -> dict[str, object]:
    return {name: _plain(value) for name, value in given.items() if not name.endswith(_PLACES)}


def _plain(value: object) -> object:
    if isinstance(value, bool | float | str | None):
        return value
    if isinstance(value, int):  # "no limit" is written as 10^30
        return value if abs(value) <= LARGEST_INTEGER else float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return str(value)  # an added token is its text
