"""Reader of the file of API keys.

::

    [[keys]]
    name = "search-team"            # the tenant; several keys may share one
    sha256 = "9f86d081884c7d65…"    # or key = "…", the key itself
    requests_per_minute = 60        # each answer to each prompt is one
    tokens_per_minute = 100000      # prompts and outputs together
    max_in_flight = 256             # sequences that wait or run at once
    min_priority = 0                # the lowest priority of requests
    operator = true                 # may use /cluster and /debug
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

from kvell.errors import ChangeSomething
from kvell.server.access.accounts import ApiKey
from kvell.server.access.keys import digest_of
from kvell.wire.decoding import MalformedError, decode_toml, read_bounded

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
SHA256 = re.compile(r"[0-9a-fA-F]{64}")
FIELDS = (
    "name",
    "key",
    "sha256",
    "requests_per_minute",
    "tokens_per_minute",
    "max_in_flight",
    "min_priority",
    "operator",
)
OTHERS_MAY_READ = 0o044
MOST_PER_MINUTE = 2**53
MAX_IN_FLIGHT = 1024
"""The default ``max_in_flight`` of a key."""
MIN_PRIORITY = 0
"""The default ``min_priority`` of a key: its requests may not precede those of priority 0."""
MOST_PRIORITY = 2**31 - 1


def read_keys(path: Path, max_in_flight: int = MAX_IN_FLIGHT) -> tuple[ApiKey, ...]:
    """Return the keys of a file, in its order.

    :param max_in_flight: the default for keys without ``max_in_flight``.
    :raises ChangeSomething: with the entry and field that is wrong, and never a key.
    """
    try:
        content = decode_toml(read_bounded(path).decode())
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise ChangeSomething("--api-key-file", path, problem, "give a readable file") from error
    except (MalformedError, UnicodeDecodeError) as error:
        # The unreadable text may be a key, so the error shows its place only.
        place = re.search(r"\(at .*\)", str(error))
        problem = f"is not valid TOML {place.group() if place else ''}".rstrip()
        raise ChangeSomething("--api-key-file", path, problem, "write [[keys]] tables") from None
    for name in content:
        if name != "keys":
            raise ChangeSomething(name, "…", "is not a part of a key file", "write [[keys]] tables")
    return _keys(content.get("keys"), max_in_flight)


def is_readable_by_others(path: Path) -> bool:
    return bool(path.stat().st_mode & OTHERS_MAY_READ)


def _keys(entries: object, max_in_flight: int) -> tuple[ApiKey, ...]:
    if not isinstance(entries, list) or not entries:
        raise ChangeSomething("keys", "[]", "has no entries", "write a [[keys]] table for each key")
    keys = tuple(_Entry(index, entry, max_in_flight).key() for index, entry in enumerate(entries))
    _check_unlike(keys)
    return keys


def _check_unlike(keys: Sequence[ApiKey]) -> None:
    first: dict[bytes, int] = {}
    for index, key in enumerate(keys):
        before = first.setdefault(key.digest, index)
        if before != index:
            problem = f"is the same key as keys[{before}]"
            raise ChangeSomething(f"keys[{index}]", key.tenant, problem, "remove one of them")


class _Entry:
    """One table of the file."""

    def __init__(self, index: int, entry: object, max_in_flight: int) -> None:
        self._place = f"keys[{index}]"
        self._max_in_flight = max_in_flight
        if not isinstance(entry, dict):
            raise self._wrong("", "…", "is not a table", "write a [[keys]] table for each key")
        self._entry: dict[str, Any] = entry

    def key(self) -> ApiKey:
        for field in self._entry:
            if field not in FIELDS:
                remedy = f"use {', '.join(FIELDS)}"
                raise self._wrong(field[:64], "…", "is not a field of a key", remedy)
        return ApiKey(
            self._name(),
            self._digest(),
            self._limit("requests_per_minute"),
            self._limit("tokens_per_minute"),
            self._operator(),
            self._limit("max_in_flight", self._max_in_flight),
            self._min_priority(),
        )

    def _name(self) -> str:
        name = self._entry.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            problem = "is not a tenant's name"
            shown = "missing" if name is None else repr(name)[:80]
            remedy = "use 1 to 64 letters, digits, '.', '_' or '-'"
            raise self._wrong("name", shown, problem, remedy)
        return name

    def _digest(self) -> bytes:
        key, sha256 = self._entry.get("key"), self._entry.get("sha256")
        if (key is None) == (sha256 is None):
            given = "both" if key is not None else "neither"
            remedy = "give exactly one of key and sha256"
            raise self._wrong("key", given, "is needed in one form", remedy)
        if sha256 is not None:
            if not isinstance(sha256, str) or not SHA256.fullmatch(sha256):
                remedy = "give the 64 hexadecimal digits of the key's SHA-256"
                raise self._wrong("sha256", "…", "is not a SHA-256", remedy)
            return bytes.fromhex(sha256)
        if (
            not isinstance(key, str)
            or not key.isascii()
            or not key.isprintable()
            or not key.strip()
        ):
            remedy = "use printable ASCII characters"
            raise self._wrong("key", "…", "cannot be sent in a header", remedy)
        if key != key.strip():
            remedy = "remove the white space around it"
            raise self._wrong("key", "…", "cannot be sent in a header", remedy)
        return digest_of(key.encode())

    def _limit(self, field: str, default: int | None = None) -> int | None:
        limit = self._entry.get(field, default)
        if limit is None:
            return None
        if not _is_whole(limit, 1, MOST_PER_MINUTE):
            remedy = "use a whole number from 1, or leave it out"
            raise self._wrong(field, repr(limit)[:80], "is not a limit", remedy)
        return limit

    def _min_priority(self) -> int:
        lowest = self._entry.get("min_priority", MIN_PRIORITY)
        if not _is_whole(lowest, -MOST_PRIORITY, MOST_PRIORITY):
            remedy = f"use a whole number; {MIN_PRIORITY} if it is left out"
            raise self._wrong("min_priority", repr(lowest)[:80], "is not a priority", remedy)
        return lowest

    def _operator(self) -> bool:
        operator = self._entry.get("operator", False)
        if not isinstance(operator, bool):
            raise self._wrong(
                "operator", repr(operator)[:80], "is not a boolean", "use true or false"
            )
        return operator

    def _wrong(self, field: str, value: str, problem: str, remedy: str) -> ChangeSomething:
        place = f"{self._place}.{field}" if field else self._place
        return ChangeSomething(place, value, problem, remedy)


def _is_whole(value: object, least: int, most: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
