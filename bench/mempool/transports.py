"""How fast a text's pages move between two processes: over each transport, and in which pieces."""

import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np

from bench.mempool.timing import Figures, spread, text_of, timed
from kvell.memory import Layout
from kvell.mempool.pool import MemPool
from kvell.mempool.rendezvous import PageTransport
from kvell.mempool.transports.page_copies import Bytes, Piece, copy_pieces, pieces_of
from kvell.mempool.transports.tcp.tcp_pages import TcpPages
from kvell.wire.blocking import BlockingSocket

SENT_TOKENS = 2048
PATIENCE_SECONDS = 60.0
SECRET = b"of the bench, which is no secret"
GRANTED = 1
"""The transfer that the other process lets read."""
SINGLE_BYTES = 65536

Told = dict[str, "int | Figures"]


@contextmanager
def other(shape: str, transport: PageTransport) -> Iterator[list[str]]:
    """A process of :mod:`bench.mempool.receiver`, and what it said of itself."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.mempool.receiver", shape, transport, folder]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as receiver:
            assert receiver.stdout is not None and receiver.stdin is not None
            yield receiver.stdout.readline().split()
            receiver.stdin.close()
            receiver.wait(PATIENCE_SECONDS)


def transfers(shape: str, layout: Layout, rounds: int, transport: PageTransport) -> Told:
    """A text to another process; beside it as many bytes by memcpy and by a bare socket."""
    mine = "tcp://127.0.0.1:0" if transport == "tcp" else None
    with (
        other(shape, transport) as (address, sink, _),
        MemPool(layout, instance="sender", address=mine, secret=SECRET) as pool,
        socket.create_connection(("127.0.0.1", int(sink))) as bare,
    ):
        pool.connect(address if transport == "tcp" else Path(address))
        pool.memory[:] = 1  # every page has its memory: first touches are not what is timed
        told: dict[str, list[float]] = {"transfer": [], "memcpy": [], "socket": []}
        sent_bytes = 0
        for number in range(rounds):
            text = text_of(number, SENT_TOKENS).tolist()
            lease = pool.alloc_mem(tokens=SENT_TOKENS)
            rows = np.asarray([(a.group, a.page, a.page) for a in lease.addresses], np.int32)
            sent_bytes = sum(one.size_bytes for one in pieces_of(layout.groups, rows))
            pool.insert(text, lease)
            told["transfer"].append(timed(partial(pool.transfer_with_insert, "receiver", text)))
            source, target = pool.memory[:sent_bytes], pool.memory[-sent_bytes:]
            told["memcpy"].append(timed(partial(np.copyto, target, source)))
            told["socket"].append(timed(partial(_through, bare, source)))
            pool.delete(text)
    rates = {name: [sent_bytes / one for one in spent] for name, spent in told.items()}
    return {
        "sent_bytes": sent_bytes,
        "of_memcpy": _ratios(rates["transfer"], rates["memcpy"]),
        "of_socket": _ratios(rates["transfer"], rates["socket"]),
        "gb_per_second": spread(rates["transfer"], unit=1e-9),
        "memcpy_gb_per_second": spread(rates["memcpy"], unit=1e-9),
        "socket_gb_per_second": spread(rates["socket"], unit=1e-9),
    }


def methods(shape: str, layout: Layout, rounds: int) -> dict[str, Figures]:
    """Gigabytes per second of a text's pages: page by page, and as extents; both transports."""
    with MemPool(layout, instance="shape") as pool:
        addresses = pool.alloc_mem(tokens=SENT_TOKENS).addresses
    rows = np.asarray([(one.group, one.page, one.page) for one in addresses], np.int32)
    pages = [piece for row in rows for piece in pieces_of(layout.groups, row[np.newaxis])]
    extents = pieces_of(layout.groups, rows)
    sent_bytes = sum(one.size_bytes for one in pages)
    used_bytes = max(one.source + one.size_bytes for one in pages)
    source, target = (np.ones(used_bytes, np.uint8) for _ in range(2))
    count = sent_bytes // SINGLE_BYTES
    single = [Piece(i * SINGLE_BYTES, i * SINGLE_BYTES, SINGLE_BYTES) for i in range(count)]
    told: dict[str, list[float]] = {}
    calls: dict[str, Callable[[], object]]
    with other(shape, "tcp") as (_, _, port):
        reads = TcpPages(lambda: BlockingSocket(socket.create_connection(("127.0.0.1", int(port)))))
        bring = partial(_bring, reads, target)
        for _ in range(rounds):
            calls = {
                "memory_64KiB": partial(copy_pieces, single, source, target),
                "memory_pages": partial(copy_pieces, pages, source, target),
                "memory_extents": partial(copy_pieces, extents, source, target),
                "tcp_a_page_at_a_time": partial(bring, [[one] for one in pages]),
                "tcp_pages": partial(bring, [pages]),
                "tcp_extents": partial(bring, [extents]),
            }
            for name, call in calls.items():
                told.setdefault(name, []).append(sent_bytes / timed(call))
        reads.close()
    figures = {name: spread(rates, unit=1e-9) for name, rates in told.items()}
    return {
        "pages": spread([len(pages)], unit=1),
        "extents": spread([len(extents)], unit=1),
    } | figures


def measured(shape: str, layout: Layout, rounds: int) -> dict[str, Told | dict[str, Figures]]:
    """All of a shape."""
    found: dict[str, Told | dict[str, Figures]] = {
        f"transfer_{transport}": transfers(shape, layout, rounds, transport)
        for transport in get_args(PageTransport)
    }
    return found | {"methods_gb_per_second": methods(shape, layout, rounds)}


def _through(bare: socket.socket, source: Bytes) -> None:
    """Send bytes through a bare socket until the other process says that it has them."""
    bare.sendall(len(source).to_bytes(8, "little"))
    bare.sendall(source.data)
    assert bare.recv(1) == b"."


def _bring(reads: TcpPages, target: Bytes, requests: list[list[Piece]]) -> None:
    for pieces in requests:
        problem = reads.bring(GRANTED, pieces, target, threading.Event())
        assert problem == "", problem


def _ratios(rates: list[float], others: list[float]) -> Figures:
    return spread([one / other for one, other in zip(rates, others, strict=True)], unit=1)
