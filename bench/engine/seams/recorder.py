"""A record of an instance's loop: spans of named stages."""

import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OPERATORS = "operators"
"""Stage of the compiled forward pass, from a step's first operator to its last."""
Span = tuple[str, float, float]
"""Stage, begin, end; in seconds."""
Plan = tuple[int, int]
"""Requests and tokens of a step."""


@dataclass
class Record:
    """All recorded spans, ordered by their ends.

    :param own: begin and end of each step's operators, by the clock of the loop's thread.
    :param plans: of each step.
    :param with_callbacks: of each forward pass.
    """

    spans: list[Span] = field(default_factory=list)
    own: list[tuple[float, float]] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    with_callbacks: list[bool] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write the record as JSON."""
        path.write_text(json.dumps(vars(self)))

    @classmethod
    def read(cls, path: Path) -> "Record":
        """Read what :meth:`write` wrote."""
        raw = json.loads(path.read_text())
        return cls(
            [(str(stage), float(begin), float(end)) for stage, begin, end in raw["spans"]],
            [(float(begin), float(end)) for begin, end in raw["own"]],
            [(int(requests), int(tokens)) for requests, tokens in raw["plans"]],
            [bool(one) for one in raw["with_callbacks"]],
        )


class Recorder:
    """Times calls of one thread; a call costs it about a microsecond.

    The thread's own clock is read at operators only: that is a system call, and takes several.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.perf_counter,
        own: Callable[[], float] = time.thread_time,
    ) -> None:
        self.record = Record()
        self._wall, self._own = wall, own

    def watch(self, owner: Any, name: str, stage: str) -> None:
        """Record calls of an attribute (of a class or a module) as spans of a stage from now on."""
        setattr(owner, name, self.timed(getattr(owner, name), stage))

    def watch_operators(self, owner: Any, name: str) -> None:
        """Record calls that compute operators, by both clocks."""
        inner, own = self.timed(getattr(owner, name), OPERATORS), self._own
        append = self.record.own.append

        def watched(*args: Any, **named: Any) -> Any:
            begin = own()
            try:
                return inner(*args, **named)
            finally:
                append((begin, own()))

        setattr(owner, name, watched)

    def timed(self, call: Callable[..., Any], stage: str) -> Callable[..., Any]:
        """Wrap a call so that it is timed, also if it raises."""
        wall, append = self._wall, self.record.spans.append

        @functools.wraps(call)
        def watched(*args: Any, **named: Any) -> Any:
            begin = wall()
            try:
                return call(*args, **named)
            finally:
                append((stage, begin, wall()))

        return watched
