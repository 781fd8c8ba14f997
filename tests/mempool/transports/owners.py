"""An owner of pages behind a port, without a greeting."""

import socket
import threading

import numpy as np

from kvell.mempool.transports.page_copies import Bytes
from kvell.mempool.transports.rights import Rights
from kvell.mempool.transports.tcp.tcp_pages import PageServer, TcpPages
from kvell.wire.blocking import BlockingSocket

GRANTED = 7
"""The transfer whose receiver may read."""


class Owner:
    """Serves pages of a pool with known contents; every connection is of the instance that is
    named next in ``names``, or of ``puller``."""

    def __init__(self, pool_bytes: int, piece_seconds: float = 60.0) -> None:
        self.memory: Bytes = np.random.default_rng(1).integers(0, 256, pool_bytes, np.uint8)
        self.rights = Rights()
        self.grant(GRANTED)
        self.server = PageServer(self.memory, self.rights, piece_seconds)
        self.names: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def grant(self, number: int, receiver: str = "puller") -> None:
        self.rights.grant(number, receiver, [(0, len(self.memory))])

    def __enter__(self) -> "Owner":
        return self

    def __exit__(self, *_error: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.server.close()
        self.rights.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            name = self.names.pop(0) if self.names else "puller"
            self.server.answer_peer(name, BlockingSocket(sock))


def channel_to(port: int) -> BlockingSocket:
    return BlockingSocket(socket.create_connection(("127.0.0.1", port)))


def pages_at(port: int) -> TcpPages:
    return TcpPages(lambda: channel_to(port))
