"""Who is let in over TCP: nobody who does not know the secret now, whatever was said before."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.errors import ChangeSomething, TryLater
from kvell.mempool.pool import MemPool
from kvell.wire.blocking import BlockingSocket
from kvell.wire.doorway import Doorway
from kvell.wire.frames import HEADER_BYTES, ProtocolError, frame
from kvell.wire.greeting import VERSION, Greeting
from kvell.wire.session import (
    NONCE_BYTES,
    Hello,
    Purpose,
    open_session,
)
from tests.depth import few
from tests.mempool.pools import SECRET, fill, layout_of, pool_at
from tests.mempool.transports.relay import Relay, unchanged
from tests.patience import until
from tests.wire.answering import answer_session

PATIENCE_SECONDS = 30.0
TEXT = list(range(100, 150))
OPENER = Greeting("opener", 3, "print", 4096, 5001)
ANSWERER = Greeting("answerer", 4, "print", 8192, 5002)


@pytest.fixture
def two() -> Iterator[tuple[BlockingSocket, BlockingSocket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = socket.create_connection(listener.getsockname())
        second, _ = listener.accept()
    with first, second:
        yield BlockingSocket(first), BlockingSocket(second)


def meet(
    opens: BlockingSocket,
    answers: BlockingSocket,
    purpose: Purpose = "messages",
    secrets: tuple[bytes, bytes] = (SECRET, SECRET),
) -> tuple[Greeting | Exception, tuple[Purpose, Greeting] | Exception]:
    """What both sides think of each other."""

    def tried(call: Callable[[], object], channel: BlockingSocket) -> object:
        try:
            return call()
        except (OSError, ProtocolError) as error:
            channel.hang_up()
            return error

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(tried, lambda: open_session(opens, OPENER, secrets[0], purpose), opens)
        other = pool.submit(tried, lambda: answer_session(answers, ANSWERER, secrets[1]), answers)
        return one.result(), other.result()  # type: ignore[return-value]


def has_ended(sock: socket.socket) -> bool:
    """Whether the other side hangs up, without a word that proves anything."""
    sock.settimeout(PATIENCE_SECONDS)
    with suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


def doorway_of(pool: MemPool) -> Doorway:
    doorway = pool.node.connections.doorway
    assert doorway is not None
    return doorway


def port_of(pool: MemPool) -> int:
    return int(str(pool.address).rpartition(":")[2])


@pytest.mark.parametrize("purpose", ["messages", "pages"])
def test_both_hear_who_the_other_is(
    two: tuple[BlockingSocket, BlockingSocket], purpose: Purpose
) -> None:
    heard, answered = meet(*two, purpose)
    assert isinstance(heard, Greeting) and isinstance(answered, tuple)
    assert msgspec.structs.replace(heard, proof="") == ANSWERER
    assert answered[0] == purpose
    assert msgspec.structs.replace(answered[1], proof="") == OPENER


@pytest.mark.parametrize("secrets", [(SECRET, SECRET + b"x"), (b"", SECRET)])
def test_another_secret_is_refused_and_told_nothing(
    two: tuple[BlockingSocket, BlockingSocket], secrets: tuple[bytes, bytes]
) -> None:
    heard, answered = meet(*two, secrets=secrets)
    assert "has another secret" in str(answered)
    assert "closed the connection" in str(heard)  # no proof came, not even a wrong one


def test_nothing_behind_the_greeting_is_read(two: tuple[BlockingSocket, BlockingSocket]) -> None:
    """Messages may come at once."""
    opens, answers = two
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(answer_session, answers, ANSWERER, SECRET)
        open_session(opens, OPENER, SECRET, "messages")
        opens.socket.sendall(b"more")
        answering.result()
    answers.socket.sendall(b"as well")
    assert (answers.socket.recv(9), opens.socket.recv(9)) == (b"more", b"as well")


class Recorded:
    """A session between two, and what either said."""

    def __init__(self) -> None:
        self.opener, self.answerer = b"", b""
        with socket.create_server(("127.0.0.1", 0)) as listener, Relay(0) as relay:
            relay._target = listener.getsockname()
            opens = BlockingSocket(socket.create_connection(("127.0.0.1", relay.port)))
            answers = BlockingSocket(listener.accept()[0])
            self._records(opens, answers)
            self.heard, self.answered = meet(opens, answers)
            opens.close()
            answers.close()

    def _records(self, opens: BlockingSocket, answers: BlockingSocket) -> None:
        send, send_back = opens.send, answers.send

        def sends(parts: list[bytes], look: Callable[[], None]) -> None:
            self.opener += b"".join(parts)
            send(parts, look)

        def sends_back(parts: list[bytes], look: Callable[[], None]) -> None:
            self.answerer += b"".join(parts)
            send_back(parts, look)

        opens.send = sends  # type: ignore[method-assign, assignment]
        answers.send = sends_back  # type: ignore[method-assign, assignment]


def test_what_was_said_once_is_worth_nothing_later(
    two: tuple[BlockingSocket, BlockingSocket],
) -> None:
    recorded = Recorded()
    assert isinstance(recorded.heard, Greeting) and recorded.opener and recorded.answerer
    opens, answers = two
    opens.socket.sendall(recorded.opener)
    with pytest.raises(ProtocolError, match="secret"):
        answer_session(answers, ANSWERER, SECRET)


def test_nor_is_an_answer(two: tuple[BlockingSocket, BlockingSocket]) -> None:
    recorded = Recorded()
    opens, answers = two
    answers.socket.sendall(recorded.answerer)
    with pytest.raises(ProtocolError, match="secret"):
        open_session(opens, OPENER, SECRET, "messages")


def test_an_echo_proves_nothing(two: tuple[BlockingSocket, BlockingSocket]) -> None:
    opens, echo = two

    def echoes() -> None:
        with suppress(OSError):
            while data := echo.socket.recv(4096):
                echo.socket.sendall(data)

    echo.socket.settimeout(PATIENCE_SECONDS)
    thread = threading.Thread(target=echoes)
    thread.start()
    with pytest.raises(ProtocolError, match="secret"):
        open_session(opens, OPENER, SECRET, "messages")
    opens.hang_up()
    thread.join()


def test_a_proof_is_for_one_purpose(two: tuple[BlockingSocket, BlockingSocket]) -> None:
    """Somebody between the two changes what the connection is said to be for."""
    opens, answers = two
    hello = frame(msgspec.msgpack.encode(Hello(VERSION, "pages", b"n" * NONCE_BYTES)))
    answers.socket.sendall(hello)
    with pytest.raises(ProtocolError, match="purpose"):
        open_session(opens, OPENER, SECRET, "messages")


@pytest.mark.parametrize(
    ("hello", "named"),
    [
        (Hello(VERSION + 1, "messages", b"n" * NONCE_BYTES), "version"),
        (Hello(VERSION, "messages", b"n"), "nonce"),
        (Hello(VERSION, "else", b"n" * NONCE_BYTES), "malformed"),  # type: ignore[arg-type]
    ],
)
def test_other_words_are_named(
    two: tuple[BlockingSocket, BlockingSocket], hello: Hello, named: str
) -> None:
    opens, answers = two
    opens.socket.sendall(frame(msgspec.msgpack.encode(hello)))
    with pytest.raises(ProtocolError, match=named):
        answer_session(answers, ANSWERER, SECRET)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[MemPool]:
    with pool_at(tmp_path, "a", transport="tcp") as one:
        yield one


def still_serves(pool: MemPool, folder: Path) -> None:
    """Somebody who knows the secret is let in and gets a text."""
    with pool_at(folder, "friend", transport="tcp") as friend:
        friend.connect(str(pool.address))
        until(lambda: pool.peers() == ["friend"])
        fill(pool, TEXT)
        assert pool.transfer_with_insert("friend", TEXT) == len(TEXT)
    until(lambda: pool.peers() == [])


def test_strangers_are_not_let_in(pool: MemPool, tmp_path: Path) -> None:
    other = b"another secret of many bytes"
    layout, address = layout_of("all"), "tcp://127.0.0.1:0"
    with MemPool(layout, instance="b", address=address, secret=other) as stranger:
        with pytest.raises(ChangeSomething, match=r"peer=.*(secret|closed the connection)"):
            stranger.connect(str(pool.address))
        with pytest.raises(ChangeSomething, match=r"peer=.*(secret|closed the connection)"):
            pool.connect(str(stranger.address))
        assert pool.peers() == stranger.peers() == []
    still_serves(pool, tmp_path)


@few()
@given(said=st.binary(min_size=HEADER_BYTES, max_size=3 * HEADER_BYTES))
def test_garbage_is_hung_up_on(said: bytes) -> None:
    layout, address = layout_of("full"), "tcp://127.0.0.1:0"
    with (
        MemPool(layout, instance="a", address=address, secret=SECRET) as pool,
        socket.create_connection(("127.0.0.1", port_of(pool))) as sock,
    ):
        sock.sendall(said)
        assert has_ended(sock)
        assert pool.peers() == []


@pytest.mark.parametrize("body", [b"x" * 5000, b"", b"\xc1", msgspec.msgpack.encode([1, 2, 3])])
def test_words_that_are_none_are_hung_up_on(pool: MemPool, tmp_path: Path, body: bytes) -> None:
    """One that is too long as soon as it is announced, before its bytes come."""
    said = frame(body)
    with socket.create_connection(("127.0.0.1", port_of(pool))) as sock:
        sock.sendall(said[:HEADER_BYTES] if len(body) > 4096 else said)
        assert has_ended(sock)
    still_serves(pool, tmp_path)


@pytest.mark.parametrize("said", [b"", b"\0\0\0"])
def test_who_says_nothing_is_hung_up_on(
    pool: MemPool, tmp_path: Path, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorway_of(pool), "_greeting_seconds", 0.2)
    with socket.create_connection(("127.0.0.1", port_of(pool))) as sock:
        sock.sendall(said)
        assert has_ended(sock)
    monkeypatch.undo()
    still_serves(pool, tmp_path)


def test_a_word_at_a_time_does_not_keep_the_door_open(
    pool: MemPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is for the whole greeting, not for each of its bytes."""
    monkeypatch.setattr(doorway_of(pool), "_greeting_seconds", 0.3)
    hello = frame(msgspec.msgpack.encode(Hello(VERSION, "messages", b"n" * NONCE_BYTES)))
    sent = 0
    with socket.create_connection(("127.0.0.1", port_of(pool))) as sock:
        with suppress(ConnectionError):
            for sent in range(len(hello)):
                sock.sendall(hello[sent : sent + 1])
                sock.settimeout(0.05)
                with suppress(TimeoutError):
                    if not sock.recv(1):
                        break
        assert 0 < sent < len(hello) - 1


def test_strangers_are_bounded(
    pool: MemPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes when too many have not said who they are takes the place of the oldest."""
    monkeypatch.setattr(doorway_of(pool), "_most_strangers", 3)
    with ExitStack() as stack:
        address = ("127.0.0.1", port_of(pool))
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(3)]
        until(lambda: doorway_of(pool).strangers == 3)
        silent.append(stack.enter_context(socket.create_connection(address)))
        assert has_ended(silent.pop(0))
        until(lambda: doorway_of(pool).strangers == 3)  # the newcomer is in its place
        still_serves(pool, tmp_path)  # who knows the secret comes in all the same
    until(lambda: not doorway_of(pool).strangers)


def test_closing_waits_for_no_stranger(tmp_path: Path) -> None:
    """Eight greeters listen to twenty silent strangers."""
    pool = pool_at(tmp_path, "a", transport="tcp")
    with ExitStack() as stack:
        address = ("127.0.0.1", port_of(pool))
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(20)]
        until(lambda: doorway_of(pool).strangers == 20)
        pool.close()
        assert all(has_ended(one) for one in silent)
        assert not doorway_of(pool).strangers


def test_an_instance_does_not_connect_to_itself(pool: MemPool) -> None:
    with pytest.raises(ChangeSomething, match=r"itself|closed the connection"):
        pool.connect(str(pool.address))
    assert pool.peers() == []


def test_who_answers_must_have_the_name_that_is_asked_for(pool: MemPool, tmp_path: Path) -> None:
    """A port that somebody else has by now."""
    with pool_at(tmp_path, "b", transport="tcp") as b:
        with pytest.raises(ChangeSomething, match="a answers there, not c"):
            b.node.connect(str(pool.address), "c")
        assert b.peers() == []
        assert b.node.connect(str(pool.address), "a") == "a"


def test_secrets_that_can_be_guessed_are_refused(tmp_path: Path) -> None:
    layout = layout_of("full")
    with pytest.raises(ChangeSomething, match="secret=5 bytes: must have 16 bytes") as caught:
        MemPool(layout, instance="a", address="tcp://127.0.0.1:0", secret=b"guess")
    assert "guess" not in str(caught.value)
    with MemPool(layout, instance="a", address=tmp_path / "a", secret=b"guess"):
        pass  # a socket that only this user can open


def test_a_pool_that_listens_nowhere_says_so_before_it_connects(pool: MemPool) -> None:
    with MemPool(layout_of("all"), instance="b", secret=SECRET) as b:
        assert b.address is None
        with pytest.raises(ChangeSomething, match=r'address=None: .* give address="tcp://'):
            b.connect(str(pool.address))


def test_another_incarnation_in_its_place_is_not_read(pool: MemPool, tmp_path: Path) -> None:
    """The sender's connection for messages stays, but its port is another incarnation's."""
    with (
        pool_at(tmp_path, "b", transport="tcp") as b,
        pool_at(tmp_path, "a", transport="tcp") as later,
        Relay(port_of(pool), unchanged) as relay,
    ):
        b.connect(relay.address)
        until(lambda: pool.peers() == ["b"])
        relay._target = ("127.0.0.1", port_of(later))
        fill(pool, TEXT)
        with pytest.raises(TryLater, match="another instance answers in its place"):
            pool.transfer_with_insert("b", TEXT)
        assert b.match(TEXT).hit_tokens == 0
