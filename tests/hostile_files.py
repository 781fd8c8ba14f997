"""Bounds on the work with one hostile file, and values to put into one."""

import json
import random
import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

MOST_CPU_SECONDS = 2
MEMORY_BYTES = 64 << 20
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**63, 2**64, 10**9, 10**30),
    *(1.5, -2.5, 1e308, float("nan"), float("inf")),
    *("", "x", "12", "full_attention", "\ud800", "\0", "x" * 5000, "../../etc/passwd"),
    *([], {}, [-1], [2**40] * 3, ["a"], [None], [[]], [{}], [[1], [2, 3]], [2**64], {"a": 1}),
    *({"rope_type": "yarn"}, {"rope_type": "llama3", "factor": 0}, {"type": "dynamic"}),
    *([8, 4], [0, 2**62], [-16, 0], "F64", "I1", ["full_attention"] * 3),
)


class TooLongError(BaseException):
    """A file that takes more of the processor than any file may; nothing catches it."""


def _end(number: int, frame: FrameType | None) -> None:
    raise TooLongError


@contextmanager
def bounded(file_bytes: int = 0) -> Iterator[None]:
    """Fail if the block takes too much of the processor, or memory beyond the file's size.

    Time is the processor's, so that the verdict does not depend on other processes.
    """
    before = signal.signal(signal.SIGPROF, _end)
    peak_bytes = _peak_bytes()
    signal.setitimer(signal.ITIMER_PROF, MOST_CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    assert _peak_bytes() - peak_bytes <= file_bytes + MEMORY_BYTES


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def spoil(value: Any, rng: random.Random, times: int) -> Any:
    """Return a copy of a JSON value with fields replaced or removed at random."""
    spoiled = json.loads(json.dumps(value))
    for _ in range(times):
        places = [*_places(spoiled)]
        if not places:
            return spoiled
        container, key = rng.choice(places)
        if rng.random() < 0.15 and isinstance(container, dict):
            del container[key]
        else:
            container[key] = json.loads(json.dumps(rng.choice(ODD_VALUES)))
    return spoiled


def spoil_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with some replaced at random, or cut."""
    spoiled = bytearray(data)
    for _ in range(rng.choice((0, 1, 3, 30))):
        if spoiled:
            spoiled[rng.randrange(len(spoiled))] = rng.randrange(256)
    return bytes(spoiled[: rng.randrange(len(spoiled) + 1)] if rng.random() < 0.3 else spoiled)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items: Sequence[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = [*value.items()]
    elif isinstance(value, list):
        items = [*enumerate(value)]
    for key, item in items:
        yield value, key
        yield from _places(item)
