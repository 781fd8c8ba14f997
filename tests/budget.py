"""What tests cost: the order in which they run, and a bound on those that nobody has listed.

``slow_tests.txt`` lists the test functions that may take more than ``MOST_SHARE`` of all time, with
their share.  Their files run first, so that no worker is left with a long one at the end.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

GROUP = re.compile(r'^pytestmark = .*xdist_group\("(\w+)"\)', re.MULTILINE)
LISTED = Path(__file__).with_name("slow_tests.txt")
MOST_SHARE = 0.04
"""The part of all time that a test function may take without being listed.

Tests that wait take a larger part on a fast machine, and any test does while a build runs beside.
"""
LISTED_ROOM = 2.5
"""How many times its listed share a test may take: machines differ."""


def listed_shares(text: str) -> dict[str, float]:
    """Share of all time by test function.

    :param text: lines of a percentage and a node id without parameters; ``#`` begins a comment.
    """
    rows = (line.split("#")[0].split() for line in text.splitlines())
    return {name: float(percent) / 100 for percent, name in filter(None, rows)}


def function_of(nodeid: str) -> str:
    """A test function's name, without parameters."""
    return nodeid.split("[")[0]


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@cache
def group_of(path: Path) -> str:
    """The ``xdist_group`` that a file's ``pytestmark`` names, or the file."""
    found = GROUP.search(path.read_text())
    return found[1] if found else str(path)


def longest_first(nodeids: Sequence[str], shares: dict[str, float]) -> list[int]:
    """The order of tests in which files with most listed time come first; else it stays."""
    by_file: dict[str, float] = {}
    for name, share in shares.items():
        by_file[file_of(name)] = by_file.get(file_of(name), 0.0) + share
    return sorted(range(len(nodeids)), key=lambda i: -by_file.get(file_of(nodeids[i]), 0.0))


@dataclass
class Costs:
    """Seconds of tests that ran, by function; setups and ends by file.

    What a file's tests share is set up in whichever of them runs first, and the first tests of a
    run also prepare what a fresh clone lacks: no function is blamed for either.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    around_seconds: dict[str, float] = field(default_factory=dict)

    def add(self, nodeid: str, seconds: float, *, is_around: bool = False) -> None:
        to, name = self.seconds, function_of(nodeid)
        if is_around:
            to, name = self.around_seconds, file_of(nodeid)
        to[name] = to.get(name, 0.0) + seconds

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values()) + sum(self.around_seconds.values())

    def slowest_files(self, count: int) -> list[tuple[str, float]]:
        files = dict(self.around_seconds)
        for name, seconds in self.seconds.items():
            files[file_of(name)] = files.get(file_of(name), 0.0) + seconds
        return sorted(files.items(), key=lambda item: -item[1])[:count]

    def too_slow(self, shares: dict[str, float]) -> Iterable[str]:
        """A line for every test function that takes more than its share."""
        total_seconds = self.total_seconds
        for name, seconds in self.seconds.items():
            share = seconds / total_seconds
            allowed = max(MOST_SHARE, shares.get(name, 0.0) * LISTED_ROOM)
            if share > allowed:
                yield (
                    f"{name} took {seconds:.1f} s, {share:.2%} of all tests; it may take "
                    f"{allowed:.2%}. Make it quicker, mark it long, or list it in {LISTED.name}"
                )
