"""The number of connections that this process has file descriptors for."""

import logging

from kvell.device.open_files import allow_open_files
from kvell.errors import ChangeSomething
from kvell.server.logs.lines import tell

logger = logging.getLogger(__name__)

RESERVED = 96
"""Descriptors not for connections: libraries, logs, listeners, sockets that are closing."""
RESERVED_PER_INSTANCE = 8
"""Descriptors of an instance's connection, pipes and memory, and those of its replacement."""
FEWEST = 16


def connections_that_fit(requested: int, instances: int) -> int:
    """Raise the limit of open files as needed; return the number of connections that fit.

    A quarter of the limit is never used for connections, since instances may be added.

    :raises ChangeSomething: when the limit is too low to serve at all.
    """
    reserved = RESERVED + RESERVED_PER_INSTANCE * instances
    wanted = max(requested + reserved, -(-requested * 4 // 3))
    open_files = allow_open_files(wanted)
    fit = min(requested, open_files - max(reserved, open_files // 4))
    if fit < FEWEST:
        problem = f"leaves too few connections, for {open_files} files may be open"
        remedy = (
            f"ask for {FEWEST} or more, under a limit of {reserved + FEWEST} or more (ulimit -n)"
        )
        raise ChangeSomething("max_connections", requested, problem, remedy)
    if fit < requested:
        limits = {"asked": requested, "allowed": fit, "open_files": open_files}
        tell(logger, logging.WARNING, "fewer_connections", **limits)
    return fit
