"""An acceptor of connections within the process's file descriptors."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from functools import partial

from kvell.server.http.connection import FULL, BoundedConnection, Face, raw_answer
from kvell.server.logs.lines import tell
from kvell.server.logs.seldom import SeldomLine

logger = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 16
"""The most connections per iteration of the event loop, which closes dropped sockets later."""
PAUSE_SECONDS = 0.2


class Acceptor:
    """An acceptor for uvicorn that replaces ``asyncio.Server``.

    ``asyncio.Server`` accepts a whole backlog before the first protocol is called.  When
    descriptors run out, it logs a traceback for each place of the backlog every second.

    :param make: factory of connections that have no transport yet.
    """

    def __init__(
        self, listener: socket.socket, face: Face, make: Callable[[], BoundedConnection]
    ) -> None:
        self._listener, self._face, self._make = listener, face, make
        self._loop = asyncio.get_running_loop()
        self._arriving: set[asyncio.Task[object]] = set()
        self._resumes: asyncio.TimerHandle | None = None
        self._full, self._failed = SeldomLine(), SeldomLine()
        listener.setblocking(False)
        self._begin()

    def close(self) -> None:
        if self._resumes is not None:
            self._resumes.cancel()
        self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Return immediately: uvicorn awaits the connections separately."""

    def _begin(self) -> None:
        self._resumes = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            self._admit(accepted)

    def _admit(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        connections = self._face.connections
        if len(connections) >= connections.most and not self._make_room():
            self._face.observer.on_rejected("connections")
            _refuse(accepted)
            return
        connection = self._make()
        connections.enter(connection, "arriving")
        arriving: asyncio.Task[object] = self._loop.create_task(
            self._loop.connect_accepted_socket(lambda: connection, accepted)
        )
        self._arriving.add(arriving)
        arriving.add_done_callback(partial(self._arrived, connection))

    def _arrived(self, connection: BoundedConnection, arriving: asyncio.Task[object]) -> None:
        self._arriving.discard(arriving)
        if arriving.cancelled() or arriving.exception() is not None:
            self._face.connections.on_closed(connection)  # the client has closed it already

    def _make_room(self) -> bool:
        """Drop the connection that has waited longest; return whether there is one."""
        untold = self._full.untold_if_due()
        if untold is not None:
            most = self._face.connections.most
            tell(logger, logging.WARNING, "connections_full", open=most, untold=untold)
        return self._drop_one()

    def _drop_one(self) -> bool:
        dropped = self._face.connections.longest_waiting()
        if dropped is not None:
            dropped.drop()
        return dropped is not None

    def _pause(self, error: OSError) -> None:
        self._loop.remove_reader(self._listener)
        self._resumes = self._loop.call_later(PAUSE_SECONDS, self._begin)
        for _ in range(ACCEPTED_AT_ONCE):
            self._drop_one()
        untold = self._failed.untold_if_due()
        if untold is not None:
            problem = os.strerror(error.errno) if error.errno else str(error)
            tell(logger, logging.ERROR, "accept_failed", problem=problem, untold=untold)


def _refuse(accepted: socket.socket) -> None:
    """Answer a client with 503; a reset may discard it if the client has sent data already."""
    with accepted, contextlib.suppress(OSError):
        accepted.send(raw_answer(FULL))
