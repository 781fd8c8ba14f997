"""Creditors whose pages are read."""

import time
from collections.abc import Callable

PATIENCE_SECONDS = 30.0


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
