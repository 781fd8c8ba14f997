"""Meter of the time inside a memory core's calls, and of the moment at which to sample it."""

import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from kvell.memory import Ints, MemoryCore

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

LOOKS = ("layout", "snapshot", "totals")
"""The members that only look."""


def _nothing() -> None:
    """Do nothing."""


class MeteredCore:
    """Wrapper that passes all calls on to ``core`` and decides nothing.

    :ivar nanoseconds: time inside the calls that manage memory, not in those that only look.
    :ivar on_advanced: called when a step's tokens are computed and pages before windows are
        released, but those of finished requests are not yet: the moment of sampling.
    """

    def __init__(self, core: MemoryCore) -> None:
        self.nanoseconds = 0
        self.on_advanced: Callable[[], None] = _nothing
        self._core = core
        self._advance = self._timed(core.advance)

    def advance(self, handles: Ints, computed: Ints) -> None:
        """Pass on and time; then call ``on_advanced``."""
        self._advance(handles, computed)
        self.on_advanced()

    def __getattr__(self, name: str) -> Any:
        """Return a member of the core; its calls are timed unless they only look."""
        member = getattr(self._core, name)
        if name not in LOOKS:
            member = self.__dict__[name] = self._timed(member)
        return member

    def _timed(self, call: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
        def measure(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
            start = time.perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self.nanoseconds += time.perf_counter_ns() - start

        return measure
