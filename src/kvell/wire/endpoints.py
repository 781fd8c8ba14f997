"""Addresses of instances, sockets that listen there, and connections to them."""

import asyncio
import contextlib
import ipaddress
import os
import socket
import struct
from pathlib import Path
from urllib.parse import urlsplit

from kvell.errors import ChangeSomething

Endpoint = Path | str
"""A path for a socket of this host, or ``tcp://host:port``."""
BACKLOG = 64
SILENCE_SECONDS = 25
"""The time without an answer after which a host counts as dead and its connections end."""


def listen_at(endpoint: Endpoint) -> socket.socket:
    """Return a listening, non-blocking socket.

    :raises ChangeSomething: when the address is invalid or cannot be bound.
    """
    try:
        if isinstance(endpoint, Path):
            listener = _listen_on_host(endpoint)
        else:
            host, port = _parsed(endpoint, "address")
            listener = socket.create_server((host, port), family=_family(host), backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        remedy = "give another path" if isinstance(endpoint, Path) else "give another host or port"
        raise ChangeSomething("address", endpoint, f"cannot be bound ({error})", remedy) from error
    listener.setblocking(False)
    return listener


def connect_to(endpoint: Endpoint, seconds: float, source: str = "") -> socket.socket:
    """Return a connected socket. ``seconds`` stays the timeout of its later calls.

    :param source: the local address, for TCP; "" lets the system choose.
    :raises ChangeSomething: when the address is invalid.
    :raises OSError: when the connection cannot be established in time.
    """
    if isinstance(endpoint, str):
        source_address = (source, 0) if source else None
        sock = socket.create_connection(_parsed(endpoint, "peer"), seconds, source_address)
        keep(sock)
        return sock
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # With Python's timeout a full backlog fails immediately. SO_SNDTIMEO waits instead.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(seconds))
        sock.connect(str(endpoint))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(0))
        sock.settimeout(seconds)
    except OSError:
        sock.close()
        raise
    return sock


async def connected_to(address: str) -> socket.socket:
    """Return a connected, non-blocking socket.

    :param address: like ``tcp://10.0.0.1:5000``.
    :raises ChangeSomething: when the address is invalid.
    :raises OSError: when the connection cannot be established.
    """
    host, port = _parsed(address, "peer")
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ValueError):  # a host name needs a lookup on a thread
        ipaddress.ip_address(host)
        return await _connected((host, port), _family(host))
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, *_, place = addresses[0]
    return await _connected((str(place[0]), port), family)


async def _connected(address: tuple[str, int], family: socket.AddressFamily) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address)
        keep(sock)
    except OSError as error:  # asyncio's message lacks the reason
        sock.close()
        raise OSError(error.errno, os.strerror(error.errno or 0)) from error
    except BaseException:
        sock.close()
        raise
    return sock


def endpoint_of(listener: socket.socket) -> Endpoint:
    if listener.family == socket.AF_UNIX:
        return Path(listener.getsockname())
    return tcp_endpoint(*listener.getsockname()[:2])


def tcp_endpoint(host: str, port: int) -> str:
    """Return a TCP address as ``tcp://host:port``, with brackets around an IPv6 host."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def keep(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_SECONDS * 1000)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _timeval(seconds: float) -> bytes:
    """Return a C ``struct timeval``. 0 means no timeout."""
    whole = int(seconds)
    return struct.pack("ll", whole, int((seconds - whole) * 1_000_000))


def _parsed(text: str, field: str) -> tuple[str, int]:
    remedy = "write it like tcp://127.0.0.1:5000, or give a Path for a socket of this host"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ChangeSomething(field, text, f"is not an address ({error})", remedy) from error
    more = parts.path or parts.query or parts.fragment or parts.username or parts.password
    if parts.scheme != "tcp" or not host or port is None or more:
        raise ChangeSomething(field, text, "is not an address", remedy)
    return host, port


def _listen_on_host(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    _unlink_dead(path)
    try:
        listener.bind(str(path))
        path.chmod(0o600)  # whatever the umask; no peer can connect before listen()
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _unlink_dead(path: Path) -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
