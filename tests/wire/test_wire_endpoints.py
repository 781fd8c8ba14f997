"""Addresses as they are written, and what listens there."""

import os
import socket
import stat
from pathlib import Path

import pytest

from kvell.errors import ChangeSomething
from kvell.wire.endpoints import connect_to, endpoint_of, listen_at, tcp_endpoint


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "[::1]"])
def test_a_free_port_is_found_and_told(host: str) -> None:
    with listen_at(f"tcp://{host}:0") as listener:
        address = endpoint_of(listener)
        assert isinstance(address, str) and not address.endswith(":0")
        with connect_to(address, 10) as sock:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        with pytest.raises(ChangeSomething, match=rf"address={address.replace('[', '.')[:6]}"):
            listen_at(address)


def test_addresses_are_written_as_they_are_read() -> None:
    assert tcp_endpoint("10.0.0.1", 5) == "tcp://10.0.0.1:5"
    assert tcp_endpoint("fe80::1", 5) == "tcp://[fe80::1]:5"


@pytest.mark.parametrize(
    "text",
    [
        *("", "127.0.0.1:5000", "http://a:1", "tcp://", "tcp://a", "tcp://:5", "tcp://a:70000"),
        *("tcp://a:x", "tcp://a:1/b", "tcp://b@a:1", "tcp://a:1?b", "tcp://[::1:5"),
    ],
)
def test_what_is_no_address_is_named_with_what_is(text: str) -> None:
    for field, call in (("address", listen_at), ("peer", lambda one: connect_to(one, 1))):
        with pytest.raises(ChangeSomething, match=r"write it like tcp://127\.0") as caught:
            call(text)
        assert (caught.value.field, caught.value.value) == (field, text)


@pytest.mark.parametrize("text", ["tcp://192.0.2.1:5000", "tcp://127.0.0.1:1"])
def test_what_cannot_be_bound_is_named(text: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if text.endswith(":1"):
            text = tcp_endpoint(*taken.getsockname())
        with pytest.raises(ChangeSomething, match="cannot be bound"):
            listen_at(text)


def test_a_socket_of_this_host(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with pytest.raises(OSError, match="No such file"):
        connect_to(path, 1)
    listener = listen_at(path)
    assert endpoint_of(listener) == path
    with connect_to(path, 1), pytest.raises(ChangeSomething, match="address"):
        listen_at(path)
    listener.close()
    assert path.exists()  # of an incarnation that is no more
    with listen_at(path), connect_to(path, 1):
        pass
    with pytest.raises(ChangeSomething, match="give another path"):
        listen_at(tmp_path / "none" / "a")


def test_a_socket_of_this_host_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with listen_at(tmp_path / "socket"):
            assert stat.S_IMODE((tmp_path / "socket").stat().st_mode) == 0o600
    finally:
        os.umask(before)
