"""Strangers at everything that listens: whatever they do, an honest peer is let in."""

import ast
import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import kvell
from kvell.wire.frames import frame
from tests.wire.hostile import HOSTILE
from tests.wire.listeners import LISTENERS, Listener

SOURCES = Path(kvell.__file__).parent
LISTEN = ("listen", "create_server", "start_server", "create_unix_server", "bind")
MAKE = ("Doorway", "listen_at")
SHARED = {
    "wire/doorway.py": "takes a listener",
    "wire/endpoints.py": "makes listeners for doorways",
    "fleet/placing/ray/node_settings.py": "looks for a free port, and listens nowhere",
}
"""Modules that are tested through those that use them."""


def listening(tree: ast.Module) -> bool:
    """Whether a module begins to listen, or has a doorway made."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute) and called.attr in LISTEN:
                return True
            if isinstance(called, ast.Name) and called.id in MAKE:
                return True
    return False


def test_everything_that_listens_is_tested_here() -> None:
    found = {
        str(file.relative_to(SOURCES))
        for file in SOURCES.rglob("*.py")
        if listening(ast.parse(file.read_text()))
    }
    assert found - SHARED.keys() == {module for module, _ in LISTENERS.values()}


@pytest.fixture(scope="module", params=LISTENERS)
def listener(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Listener]:
    _, opens = LISTENERS[request.param]
    with opens(tmp_path_factory.mktemp("listener")) as opened:
        yield opened


def say(sock: socket.socket, words: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(words)
        sock.shutdown(socket.SHUT_WR)


def is_hung_up_on(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


NONSENSE = {
    "a frame that announces four billion bytes": struct.pack("<III", (1 << 32) - 1, 0, 0) * 8,
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "HTTP": b"GET /health HTTP/1.1\r\nX: \xff\r\nContent-Length: -1\r\n\r\n",
    "TLS": bytes.fromhex("16030100f8010000f40303") + bytes(237),
    "half a frame": frame(b"hello")[:-1],
    **{f"framed: {name}": frame(body) for name, body in HOSTILE.items()},
}


@pytest.mark.parametrize("words", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_hung_up_on(listener: Listener, words: bytes) -> None:
    with listener.connected() as sock:
        say(sock, words)
        assert is_hung_up_on(sock)
    listener.meet()


def resets(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize(
    "leaves", [socket.socket.close, resets, lambda sock: sock.shutdown(socket.SHUT_RD)]
)
def test_whoever_leaves_at_once_leaves_nothing(
    listener: Listener, leaves: Callable[[socket.socket], object]
) -> None:
    with ExitStack() as stack:
        for _ in range(listener.most + 8):
            leaves(stack.enter_context(listener.connected()))
        listener.meet()


@pytest.mark.parametrize("words", [b"", b"\0", frame(b"x" * 100)[:50]])
def test_more_silent_ones_than_are_heard_keep_nobody_out(listener: Listener, words: bytes) -> None:
    with ExitStack() as stack:
        for _ in range(listener.most + 8):
            with contextlib.suppress(OSError):  # it made way already
                stack.enter_context(listener.connected()).sendall(words)
        listener.meet()
