"""What stands between a puller and an owner: passes on bytes, or does to them what it is told."""

import contextlib
import socket
import threading
from collections.abc import Callable

SMALL_BUFFER_BYTES = 64 << 10
"""Of the socket towards the owner: what waits here waits there too."""

Passes = Callable[[int, int, bytes], bytes | None]
"""Given the connection, the offset in what its owner says, and bytes from there on: what is passed
on instead; None cuts the connection."""


def unchanged(_connection: int, _offset: int, data: bytes) -> bytes:
    return data


class Relay:
    """Listens at ``port`` and connects to an owner for each connection.

    :ivar passed_bytes: of each connection, what its owner has said so far.
    """

    def __init__(self, port: int, passes: Passes = unchanged) -> None:
        self._target, self.passes = ("127.0.0.1", port), passes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.passed_bytes: list[int] = []
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_error: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in list(self._threads):
            thread.join()
        for one in (self._listener, *self._sockets):
            one.close()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def cut(self) -> None:
        for one in list(self._sockets):
            _end(one)

    def _accept(self) -> None:
        while True:
            try:
                puller, _ = self._listener.accept()
            except OSError:
                return
            owner = socket.socket()
            owner.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
            owner.connect(self._target)
            self._sockets += [puller, owner]
            connection = len(self.passed_bytes)
            self.passed_bytes.append(0)
            asked = threading.Thread(target=_pump, args=(puller, owner), daemon=True)
            said = threading.Thread(
                target=self._said, args=(connection, owner, puller), daemon=True
            )
            self._threads += [asked, said]
            asked.start()
            said.start()

    def _said(self, connection: int, owner: socket.socket, puller: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := owner.recv(SMALL_BUFFER_BYTES):
                passed = self.passes(connection, self.passed_bytes[connection], data)
                if passed is None:
                    break
                self.passed_bytes[connection] += len(data)
                puller.sendall(passed)
        _end(puller)
        owner.close()  # with what was not read: the owner sees it at once


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(SMALL_BUFFER_BYTES):
            target.sendall(data)
    _end(source)
    _end(target)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


class Flip:
    """Flips one bit of what an owner says.

    :param connection: in which; None: any.
    :param offset: where.
    :ivar flipped: bytes that were changed.
    """

    def __init__(self, offset: int, connection: int | None = None) -> None:
        self.offset, self.connection = offset, connection
        self.flipped = 0

    def __call__(self, connection: int, offset: int, data: bytes) -> bytes:
        at = self.offset - offset
        if self.connection not in (None, connection) or not 0 <= at < len(data) or self.flipped:
            return data
        self.flipped += 1
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


class Hold:
    """Keeps what an owner says from an offset on until it is released.

    :ivar holds: is set once it does.
    """

    def __init__(self, offset: int, connection: int | None = None) -> None:
        self.offset, self.connection = offset, connection
        self.holds, self.released = threading.Event(), threading.Event()

    def __call__(self, connection: int, offset: int, data: bytes) -> bytes:
        if self.connection in (None, connection) and offset + len(data) > self.offset:
            self.holds.set()
            self.released.wait()
        return data
