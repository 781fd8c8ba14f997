"""Where instances listen: a path for a socket of this host, or ``tcp://host:port``."""

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
"""A host that answers nothing for so long is gone: its TCP connections end."""


def listen_at(endpoint: Endpoint) -> socket.socket:
    """A socket that listens and does not block.

    :raises ChangeSomething: when the address is none, or cannot be bound.
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
    """A connected socket, with a timeout for its next calls.

    :param source: own address that the peer sees, for TCP; "" lets the system choose.
    :raises ChangeSomething: when the address is none.
    :raises OSError: when nobody answers there in time.
    """
    if isinstance(endpoint, str):
        own = (source, 0) if source else None
        sock = socket.create_connection(_parsed(endpoint, "peer"), seconds, own)
        keep(sock)
        return sock
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # With Python's timeout a full backlog would be an error at once; the system's own waits.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(seconds))
        sock.connect(str(endpoint))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(0))
        sock.settimeout(seconds)
    except OSError:
        sock.close()
        raise
    return sock


async def connected_to(address: str) -> socket.socket:
    """A connected socket that does not block.

    :param address: like ``tcp://10.0.0.1:5000``.
    :raises ChangeSomething: when the address is none.
    :raises OSError: when nobody answers there.
    """
    host, port = _parsed(address, "peer")
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ValueError):  # a name is looked up, which takes a thread
        ipaddress.ip_address(host)
        return await _connected((host, port), _family(host))
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, *_, place = found[0]
    return await _connected((str(place[0]), port), family)


async def _connected(address: tuple[str, int], family: socket.AddressFamily) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address)
        keep(sock)
    except OSError as error:  # asyncio's own words do not say why
        sock.close()
        raise OSError(error.errno, os.strerror(error.errno or 0)) from error
    except BaseException:
        sock.close()
        raise
    return sock


def endpoint_of(listener: socket.socket) -> Endpoint:
    """Where a socket listens."""
    if listener.family == socket.AF_UNIX:
        return Path(listener.getsockname())
    return tcp_endpoint(*listener.getsockname()[:2])


def tcp_endpoint(host: str, port: int) -> str:
    """An address as it is written."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def keep(sock: socket.socket) -> None:
    """Send what is said at once, and notice when the other host is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_SECONDS * 1000)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _timeval(seconds: float) -> bytes:
    """A C ``struct timeval``; 0 waits without end."""
    whole = int(seconds)
    return struct.pack("ll", whole, int((seconds - whole) * 1_000_000))


def _parsed(text: str, field: str) -> tuple[str, int]:
    remedy = "write it like tcp://127.0.0.1:5000, or give a Path for a socket of this host"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ChangeSomething(field, text, f"is no address ({error})", remedy) from error
    more = parts.path or parts.query or parts.fragment or parts.username or parts.password
    if parts.scheme != "tcp" or not host or port is None or more:
        raise ChangeSomething(field, text, "is no address", remedy)
    return host, port


def _listen_on_host(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    _unlink_dead(path)
    try:
        listener.bind(str(path))
        path.chmod(0o600)  # whatever the umask; before it listens, nobody can connect
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _unlink_dead(path: Path) -> None:
    """Remove the socket of an incarnation that is no more."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
