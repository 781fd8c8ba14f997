"""How many connections this process has descriptors for."""

import logging

from kvell.device.open_files import allow_open_files
from kvell.errors import ChangeSomething
from kvell.server.logs.lines import tell

logger = logging.getLogger(__name__)

RESERVED = 96
"""Descriptors for all but connections: libraries, logs, listeners, sockets that are closing."""
RESERVED_PER_INSTANCE = 8
"""Its connection, its pipes, its memory, and those of one that takes its place."""
FEWEST = 16


def connections_that_fit(asked: int, instances: int) -> int:
    """Raise the limit of open files as far as connections need it; how many of them it allows.

    A quarter of the limit is never used for connections, since instances may be added.

    :raises ChangeSomething: when the limit is too low to serve at all.
    """
    reserved = RESERVED + RESERVED_PER_INSTANCE * instances
    wanted = max(asked + reserved, -(-asked * 4 // 3))
    open_files = allow_open_files(wanted)
    fit = min(asked, open_files - max(reserved, open_files // 4))
    if fit < FEWEST:
        problem = f"leaves too few connections, for {open_files} files may be open"
        remedy = (
            f"ask for {FEWEST} or more, under a limit of {reserved + FEWEST} or more (ulimit -n)"
        )
        raise ChangeSomething("max_connections", asked, problem, remedy)
    if fit < asked:
        limits = {"asked": asked, "allowed": fit, "open_files": open_files}
        tell(logger, logging.WARNING, "fewer_connections", **limits)
    return fit
