"""The number of lines that a piece of work executes, which does not depend on the machine."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def operations(work: Callable[[], object]) -> int:
    """Return how many lines of Python ``work`` executes."""
    lines = 0

    def trace(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines
