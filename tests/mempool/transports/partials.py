"""A creditor that answers queries."""

import contextlib
import socket
import threading

from kvell.mempool.transports.tcp.partials import (
    Answers,
    PartialsServer,
)
from kvell.wire.blocking import BlockingSocket

PATIENCE_SECONDS = 60.0


class Creditor:
    """A listener that takes every connection as one of the debtor "p"."""

    def __init__(self, answers: Answers, answer_seconds: float = PATIENCE_SECONDS) -> None:
        self.server = PartialsServer(answers, answer_seconds)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.met = 0
        self.thread = threading.Thread(target=self._accept, daemon=True)
        self.thread.start()

    def opens(self) -> BlockingSocket:
        return BlockingSocket(socket.create_connection(self.listener.getsockname()))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()
        self.server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                self.met += 1
                self.server.answer_peer("p", BlockingSocket(sock))
