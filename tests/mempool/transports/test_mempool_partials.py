"""Queries and answers over connections: in order, whatever is large, late, silent or gone."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import given
from hypothesis import strategies as st

from kvell.mempool.transports.tcp.partials import (
    MOST_UNSENT_BYTES,
    ROOM_BYTES,
    Answers,
    PartialsLine,
)
from kvell.wire.blocking import BlockingSocket
from kvell.wire.frames import frame
from tests.depth import few
from tests.mempool.seen import channels_of
from tests.mempool.transports.partials import PATIENCE_SECONDS, Creditor
from tests.patience import until

LARGE_BYTES = ROOM_BYTES // 2


def doubled(debtor: str, query: bytes) -> bytes:
    return debtor.encode() + query + query


@contextmanager
def asked(
    answers: Answers = doubled, answer_seconds: float = PATIENCE_SECONDS
) -> Iterator[tuple[PartialsLine, Creditor]]:
    creditor = Creditor(answers, answer_seconds)
    line = PartialsLine(creditor.opens)
    try:
        yield line, creditor
    finally:
        line.close()
        creditor.close()


@few()
@given(queries=st.lists(st.binary(max_size=300), min_size=1, max_size=12))
def test_answers_come_in_the_order_of_queries(queries: list[bytes]) -> None:
    with asked() as (line, _):
        for query in queries:
            assert line.post(query)
        found = [line.take(PATIENCE_SECONDS) for _ in queries]
        assert found == [doubled("p", query) for query in queries]


def test_large_queries_meet_large_answers() -> None:
    """Neither side waits for the other to read first: more is under way than sockets hold."""

    def answers(_debtor: str, query: bytes) -> bytes:
        return query[:1] * LARGE_BYTES

    with asked(answers) as (line, _):
        rows = [bytes([index]) * LARGE_BYTES for index in range(3)]
        assert all(line.post(row) for row in rows)
        assert [line.take(PATIENCE_SECONDS) for _ in rows] == rows


def test_a_late_answer_is_there_for_who_waits_longer() -> None:
    goes_on = threading.Event()

    def answers(_debtor: str, query: bytes) -> bytes:
        assert goes_on.wait(PATIENCE_SECONDS)
        return query

    with asked(answers) as (line, _):
        assert line.post(b"first") and line.post(b"second")
        assert line.take(0.05) is None
        goes_on.set()
        assert line.take(PATIENCE_SECONDS) == b"first"
        assert line.take(PATIENCE_SECONDS) == b"second"


def test_who_reads_nothing_is_asked_only_so_much() -> None:
    """A process that is stopped costs bounded memory, and no time."""
    listener = socket.create_server(("127.0.0.1", 0))
    line = PartialsLine(lambda: BlockingSocket(socket.create_connection(listener.getsockname())))
    query, posted = bytes(ROOM_BYTES // 4), 0
    begun = time.monotonic()
    while line.post(query):
        posted += 1
        assert posted < 1000
    assert posted * len(query) >= MOST_UNSENT_BYTES - len(query)
    assert time.monotonic() - begun < PATIENCE_SECONDS
    assert line.take(0.05) is None
    while line.post(query):  # the system may have taken some meanwhile, and takes no more then
        posted += 1
        assert posted < 1000
    line.close()
    listener.close()


def test_nothing_waits_for_a_connection_but_a_take() -> None:
    may_open = threading.Event()
    with asked() as (_, creditor):

        def opens() -> BlockingSocket:
            assert may_open.wait(PATIENCE_SECONDS)
            return creditor.opens()

        line = PartialsLine(opens)
        assert line.post(b"a")
        assert line.take(0.05) is None
        may_open.set()
        assert line.take(PATIENCE_SECONDS) == doubled("p", b"a")
        line.close()


def fails() -> BlockingSocket:
    raise OSError("nobody answers")


def test_a_creditor_that_cannot_be_reached_is_refused_at_once() -> None:
    line = PartialsLine(fails)
    begun = time.monotonic()
    assert line.take(PATIENCE_SECONDS) is None or not line.post(b"a")
    assert line.take(PATIENCE_SECONDS) is None
    assert time.monotonic() - begun < PATIENCE_SECONDS
    line.close()


def test_a_connection_that_ended_is_opened_anew() -> None:
    with asked() as (line, creditor):
        assert line.post(b"a")
        assert line.take(PATIENCE_SECONDS) == doubled("p", b"a")
        for channel in channels_of(creditor.server):
            channel.hang_up()
        until(lambda: not len(creditor.server))
        assert line.take(PATIENCE_SECONDS) is None  # what was under way is lost with it
        assert line.post(b"b")
        assert line.take(PATIENCE_SECONDS) == doubled("p", b"b")
        assert creditor.met == 2


def test_closing_ends_a_take_that_waits() -> None:
    with asked(lambda _debtor, _query: threading.Event().wait(1) * b"") as (line, _):
        assert line.post(b"a")
        found: list[bytes | None] = []
        taking = threading.Thread(target=lambda: found.append(line.take(PATIENCE_SECONDS)))
        taking.start()
        line.close()
        taking.join(PATIENCE_SECONDS)
        assert found in ([None], [b""]) and line.is_closed
        assert not line.post(b"a") and line.take(PATIENCE_SECONDS) is None


@few()
@given(said=st.binary(min_size=1, max_size=100))
def test_rubbish_from_a_creditor_ends_its_connection(said: bytes) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    line = PartialsLine(lambda: BlockingSocket(socket.create_connection(listener.getsockname())))
    assert line.post(b"a")
    sock, _ = listener.accept()
    sock.sendall(said)
    sock.close()
    assert line.take(PATIENCE_SECONDS) is None
    line.close()
    listener.close()


def test_who_stops_in_the_middle_of_a_query_is_given_up() -> None:
    with asked(answer_seconds=0.3) as (_, creditor):
        channel = creditor.opens()
        channel.socket.sendall(frame(b"abc")[:-1])
        channel.socket.settimeout(PATIENCE_SECONDS)
        assert channel.socket.recv(1) == b""
        until(lambda: not len(creditor.server))
        channel.close()


def test_answers_end_when_a_server_closes() -> None:
    with asked() as (line, creditor):
        assert line.post(b"a")
        assert line.take(PATIENCE_SECONDS) == doubled("p", b"a")
        creditor.server.close()
        assert not len(creditor.server)
        assert line.take(PATIENCE_SECONDS) is None
        late = creditor.opens()
        until(lambda: creditor.met == 2)
        assert late.socket.recv(1) == b""
        late.close()
