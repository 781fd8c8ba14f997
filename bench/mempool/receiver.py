"""A process that takes in what the bench sends, until its standard input ends.

It prints its pool's address, the port of a bare socket that takes in bytes, and the port at which
its pages are read without a greeting.
"""

import socket
import sys
import threading
from pathlib import Path

from bench.mempool.shapes import MOVED_POOL_BYTES
from bench.mempool.transports import GRANTED, SECRET
from bench.replay.shapes import layout_of, read_shape
from kvell.mempool.pool import MemPool
from kvell.mempool.transports.page_copies import Bytes
from kvell.mempool.transports.rights import Rights
from kvell.mempool.transports.tcp.tcp_pages import PageServer
from kvell.wire.blocking import BlockingSocket


def main(shape: str, transport: str, folder: Path) -> None:
    """Serve one sender."""
    layout = layout_of(read_shape(shape), MOVED_POOL_BYTES)
    address = "tcp://127.0.0.1:0" if transport == "tcp" else folder / "receiver"
    with (
        MemPool(layout, instance="receiver", address=address, secret=SECRET) as pool,
        socket.create_server(("127.0.0.1", 0)) as sink,
        socket.create_server(("127.0.0.1", 0)) as reads,
    ):
        pool.memory[:] = 0  # every page has its memory
        rights = Rights()
        rights.grant(GRANTED, "sender", [(0, len(pool.memory))])
        server = PageServer(pool.memory, rights)
        threading.Thread(target=_take_in, args=(sink, pool.memory), daemon=True).start()
        threading.Thread(target=_let_read, args=(reads, server), daemon=True).start()
        print(pool.address, *(one.getsockname()[1] for one in (sink, reads)), flush=True)
        sys.stdin.read()
        server.close()


def _take_in(sink: socket.socket, memory: Bytes) -> None:
    """Lengths, each followed by as many bytes, which go to the end of the pool."""
    bare, _ = sink.accept()
    with bare:
        while header := bare.recv(8, socket.MSG_WAITALL):
            size_bytes = int.from_bytes(header, "little")
            target, done = memory.data[-size_bytes:], 0
            while done < size_bytes:
                done += bare.recv_into(target[done:])
            bare.sendall(b".")


def _let_read(reads: socket.socket, server: PageServer) -> None:
    reader, _ = reads.accept()
    server.answer_peer("sender", BlockingSocket(reader))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
