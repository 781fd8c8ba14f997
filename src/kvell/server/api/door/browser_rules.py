"""Requests of web pages to a server without keys: host names and origins that are answered.

A browser sends a page's requests to any address, also to this machine's.  It adds the page's origin
and, for a name that its owner points to this machine, that name as the host.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.types import Scope

from kvell.server.api.door.body_headers import Headers
from kvell.server.api.door.face_options import ANY, FaceOptions
from kvell.server.api.http_errors import ApiError

SINGLE_LABEL = re.compile(r"[a-z][a-z0-9_-]{0,62}", re.IGNORECASE)
"""A host name without a dot, such as ``localhost`` or a container's: no page can own it."""
PAGES = frozenset({"/", "/docs"})
"""Pages that show nothing by themselves: links of other sites may lead to them."""
OWN_SITES = frozenset({b"same-origin", b"none"})
"""Values of ``Sec-Fetch-Site`` for a page of this server, and for an address that a user typed."""
LONGEST_SHOWN = 100
_HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:]*))(?::(\d*))?", re.ASCII)
_PORTS = {"http": "80", "https": "443"}
FOREIGN_HOST, FOREIGN_ORIGIN = "foreign_host", "foreign_origin"


@dataclass(frozen=True)
class BrowserRules:
    """The requests of browsers that need no key.

    :param hosts: host names besides those without a dot and IP addresses; ``*.name`` are all below
        a name, ``*`` are all.
    :param origins: origins of other pages that may send requests; ``*`` are all.
    """

    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    @classmethod
    def from_options(cls, face: FaceOptions) -> "BrowserRules":
        return cls(face.allowed_hosts, face.cross_origin.origins)

    def refusal(self, path: str, scope: Scope) -> ApiError | None:
        """Return the error of a request with a foreign host name or from a foreign page.

        Programs that are not browsers send neither an origin nor ``Sec-Fetch-Site``.

        :param path: path of the request, without a root path.
        """
        headers: Headers = scope["headers"]
        hosts = _values(headers, b"host")
        if not all(self._is_served(host) for host in hosts) or len(hosts) > 1:
            return _foreign_host(b", ".join(hosts))
        origins = _values(headers, b"origin")
        for origin in origins:
            if not self._is_allowed(origin) and not (hosts and _is_same(origin, hosts[0])):
                return _foreign_origin("origin", origin)
        for site in _values(headers, b"sec-fetch-site"):
            if site.lower() in OWN_SITES or ANY in self.origins:
                continue
            if not (origins or (path in PAGES and _is_navigation(scope["method"], headers))):
                return _foreign_origin("sec-fetch-site", site)
        return None

    def _is_served(self, host: bytes) -> bool:
        name = _host_and_port(host.decode("latin-1"))[0]
        is_single = not host.startswith(b"[") and SINGLE_LABEL.fullmatch(name)
        if ANY in self.hosts or not name or is_single or _is_address(name):
            return True
        return any(_matches(name, allowed.lower()) for allowed in self.hosts)

    def _is_allowed(self, origin: bytes) -> bool:
        return ANY in self.origins or origin.decode("latin-1") in self.origins


def _values(headers: Headers, name: bytes) -> list[bytes]:
    return [value.strip() for key, value in headers if key == name and value.strip()]


def _host_and_port(text: str) -> tuple[str, str]:
    """Return the name in lower case, without the brackets of an IPv6 address, and the port."""
    split = _HOST.fullmatch(text.lower())
    if split is None:
        return text.lower(), ""
    address, name, port = split.groups("")
    return address or name.removesuffix("."), port


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _matches(name: str, allowed: str) -> bool:
    if allowed.startswith(f"{ANY}."):
        return name.endswith(allowed[1:])
    return name == allowed


def _is_same(origin: bytes, host: bytes) -> bool:
    scheme, _, place = origin.decode("latin-1").lower().partition("://")
    usual = _PORTS.get(scheme)
    if usual is None:
        return False
    page_name, page_port = _host_and_port(place)
    name, port = _host_and_port(host.decode("latin-1"))
    return (page_name, page_port or usual) == (name, port or usual)


def _is_navigation(method: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a user follows a link: the page with the link cannot read the answer."""
    sent = dict(headers)
    is_link = sent.get(b"sec-fetch-mode") == b"navigate"
    return method in ("GET", "HEAD") and is_link and sent.get(b"sec-fetch-dest") == b"document"


def _foreign_host(host: bytes) -> ApiError:
    shown = _shown(host)
    name = _host_and_port(shown)[0]
    return ApiError(
        403,
        f"host={shown}: this name is not served without API keys; "
        f"start the server with --allowed-hosts {name}, or with --api-key",
        "invalid_request_error",
        "host",
        FOREIGN_HOST,
    )


def _foreign_origin(header: str, value: bytes) -> ApiError:
    shown = _shown(value)
    origin = shown if header == "origin" else "ORIGIN"
    return ApiError(
        403,
        f"{header}={shown}: pages of other origins are not served without API keys; "
        f"start the server with --allowed-origins {origin}, or with --api-key",
        "invalid_request_error",
        header,
        FOREIGN_ORIGIN,
    )


def _shown(value: bytes) -> str:
    return value[:LONGEST_SHOWN].decode("ascii", "replace")
