"""The standard error of commands that serve: a thread writes it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvell.server.logs.background import FLUSH_SECONDS, BackgroundStream


@contextmanager
def stderr_to(stream: BackgroundStream, flush_seconds: float = FLUSH_SECONDS) -> Iterator[None]:
    """Let everything that this process prints on stderr go to a stream while the block runs.

    If its reader is stuck at the end, the stream stays in place, and what follows is dropped: else
    the process could not end.
    """
    before = sys.stderr
    sys.stderr = stream
    try:
        yield
    finally:
        if stream.end(flush_seconds):
            sys.stderr = before
