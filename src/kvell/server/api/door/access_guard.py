"""Access control: the keys of paths, the request limits of keys, and the pages of other origins.

A server without keys answers only web pages of its own hosts and of allowed origins.  A browser
sends a page's requests to any address, also to this machine's.  It adds the page's origin and, for
a name that its owner points to this machine, that name as the host.
"""

import ipaddress
import re
import zlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvell.clock import Clock, MonotonicClock
from kvell.errors import Bound
from kvell.server.access.accounts import Account, RateExceeded
from kvell.server.access.keys import KeyRing
from kvell.server.access.traced_visit import Tracer
from kvell.server.access.visit import CLIENT_GONE_STATUS, RequestContext
from kvell.server.api.door.face_options import ANY, FaceOptions, checked_root_path
from kvell.server.api.http_errors import ApiError, api_error, invalid_request, served_path
from kvell.server.logs.visits import VisitLines

Headers = Iterable[tuple[bytes, bytes]]
_WINDOWS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 47}
"""zlib's ``wbits`` by content encoding."""
_LONGEST_VALUE = 64


def refused_type(kind: bytes, *, has_body: bool) -> ApiError | None:
    """Return the error of a content type that is not JSON; None if it is JSON.

    Browsers ask a server for permission before they send JSON to it, but send forms, texts and
    bodies without a type unasked.

    :param kind: the header.
    :param has_body: whether a body must have a type.
    """
    kind = kind.partition(b";")[0].strip().lower()
    if kind == b"application/json" or kind.endswith(b"+json") or not (kind or has_body):
        return None
    problem = "is not JSON" if kind else "is missing"
    return _unsupported("content-type", kind, f"{problem}; use application/json")


def refused_encoding(encoding: bytes) -> ApiError | None:
    """Return the error of a content encoding that is not supported, or None."""
    if encoding in _WINDOWS:
        return None
    return _unsupported("content-encoding", encoding, "is not served; use gzip, deflate or none")


def decompress(body: bytes, encoding: bytes, most_bytes: int) -> bytes | ApiError | None:
    """Decompress a body; return None if it is too long, an error if it is malformed.

    At most one byte more than ``most_bytes`` is ever decompressed.
    """
    reader = zlib.decompressobj(_WINDOWS[encoding])
    try:
        plain = reader.decompress(body, most_bytes + 1)
    except zlib.error:
        plain = b""
    if len(plain) > most_bytes:
        return None
    if not reader.eof or reader.unused_data:
        return invalid_request(
            f"content-encoding={encoding.decode()}: the body is incomplete or malformed; "
            "compress the whole body, or send it as it is",
            "content-encoding",
        )
    return plain


def json_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    replaced = (b"content-type", b"content-encoding", b"content-length")
    rest = [(name, value) for name, value in headers if name not in replaced]
    return [*rest, (b"content-type", b"application/json")]


def _unsupported(name: str, value: bytes, problem: str) -> ApiError:
    shown = value[:_LONGEST_VALUE].decode("ascii", "replace")
    return invalid_request(f"{name}={shown}: {problem}", name, status=415)


def header_of(headers: Headers, name: bytes) -> bytes:
    """Return the value of a header by its lower-case name; empty if the header is absent."""
    return next((value for key, value in headers if key == name), b"")


SINGLE_LABEL = re.compile(r"[a-z][a-z0-9_-]{0,62}", re.IGNORECASE)
"""A host name without a dot, such as ``localhost`` or a container's: no page can own it."""
PAGES = frozenset({"/", "/docs"})
"""Pages that show nothing by themselves: links of other sites may lead to them."""
OWN_SITES = frozenset({b"same-origin", b"none"})
"""Values of ``Sec-Fetch-Site`` for a page of this server, and for an address that a user typed."""
LONGEST_SHOWN = 100
MOST_HOSTS = 64
"""Host names of requests that are remembered."""
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

    def refusal(self, path: str, scope: Scope) -> ApiError | None:
        """Return the error of a request with a foreign host name or from a foreign page.

        Programs that are not browsers send neither an origin nor ``Sec-Fetch-Site``.

        :param path: path of the request, without a root path.
        """
        headers: Headers = scope["headers"]
        hosts = _values(headers, b"host")
        if not all(_is_served(self.hosts, host) for host in hosts) or len(hosts) > 1:
            return _foreign_host(b", ".join(hosts))
        names = {name for name, _ in headers}
        if b"origin" not in names and b"sec-fetch-site" not in names:
            return None  # programs that are no browsers
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

    def _is_allowed(self, origin: bytes) -> bool:
        return ANY in self.origins or origin.decode("latin-1") in self.origins


@lru_cache(MOST_HOSTS)
def _is_served(hosts: tuple[str, ...], host: bytes) -> bool:
    name = _host_and_port(host.decode("latin-1"))[0]
    is_single = not host.startswith(b"[") and SINGLE_LABEL.fullmatch(name)
    if ANY in hosts or not name or is_single or _is_address(name):
        return True
    return any(_matches(name, allowed.lower()) for allowed in hosts)


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
    flag = f"--allowed-hosts {_host_and_port(shown)[0]}"
    return _foreign("host", shown, "this name is", flag, FOREIGN_HOST)


def _foreign_origin(header: str, value: bytes) -> ApiError:
    shown = _shown(value)
    flag = f"--allowed-origins {shown if header == 'origin' else 'ORIGIN'}"
    return _foreign(header, shown, "pages of other origins are", flag, FOREIGN_ORIGIN)


def _foreign(header: str, shown: str, what: str, flag: str, code: str) -> ApiError:
    text = f"{header}={shown}: {what} not served without API keys; start the server with {flag}"
    return ApiError(403, f"{text}, or with --api-key", "invalid_request_error", header, code)


def _shown(value: bytes) -> str:
    return value[:LONGEST_SHOWN].decode("ascii", "replace")


EXPOSED = (
    "Retry-After",
    *(
        f"x-ratelimit-{what}-{unit}"
        for what in ("limit", "remaining", "reset")
        for unit in ("requests", "tokens")
    ),
)
"""Response headers that scripts of other origins may read."""


def install_browsers(app: FastAPI, options: FaceOptions) -> None:
    """Add CORS and the root path outside of all guards: a preflight request has no key.

    :raises ChangeSomething: if the root path is not a path.
    """
    cors = options.cross_origin
    if cors.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors.origins,
            allow_methods=cors.methods,
            allow_headers=cors.headers,
            allow_credentials=cors.credentials,
            allow_private_network=True,  # a public page may use a server in a private network
            expose_headers=EXPOSED,
        )
    if root_path := checked_root_path(options.root_path):
        app.add_middleware(UnderRoot, root_path=root_path)


class UnderRoot:
    """The middleware that serves under a proxy's root path, whether or not the proxy strips it.

    :param root_path: begins with a slash and does not end with one.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app, self._root_path = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            root = self._root_path
            path = scope["path"]
            whole = path if path == root or path.startswith(f"{root}/") else root + path
            scope = {**scope, "root_path": root, "path": whole}
        await self._app(scope, receive, send)


class HeadAsGet:
    """The middleware that answers HEAD like GET, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            return self._app(scope, receive, send)

        async def send_head(message: Message) -> None:
            is_body = message["type"] == "http.response.body"
            await send({**message, "body": b""} if is_body else message)

        return self._app({**scope, "method": "GET"}, receive, send_head)


OPEN = frozenset({"/", "/docs", "/livez", "/readyz", "/health", "/ping", "/version"})
"""Paths that need no key; every other path needs a key, even if it is not served."""
METRICS = "/metrics"
OPERATORS = ("/cluster", "/debug", "/reset_prefix_cache")
"""Prefixes of paths that need an operator's key: they show or change the server itself."""
SERVER_ERROR = 500
LONGEST_REQUEST_ID = 128
NO_KEY = ApiError(
    401,
    "missing or wrong API key; send Authorization: Bearer <key>, or x-api-key: <key>",
    "invalid_request_error",
    code="invalid_api_key",
)
NO_OPERATOR = ApiError(
    403,
    "this path needs an operator's API key",
    "invalid_request_error",
    code="insufficient_permissions",
)


@dataclass(frozen=True)
class Access:
    """The access rules of a server.

    :param keys: an empty ring allows every request.
    :param guards_metrics: whether ``/metrics`` needs an operator's key.
    :param observer: notified of refused keys and ended requests.
    :param tracer: traces admitted requests.
    """

    keys: KeyRing = field(default_factory=lambda: KeyRing((), 0.0))
    guards_metrics: bool = False
    observer: VisitLines | None = None
    clock: Clock = field(default_factory=MonotonicClock)
    tracer: Tracer | None = None


def visit_of(request: Request) -> RequestContext:
    visit: RequestContext = request.state.visit
    return visit


class AccessGuard:
    """The middleware that admits a request, follows it to its end, and settles its usage."""

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        rejected: Callable[[Bound], None] = lambda bound: None,
        browsers: BrowserRules = BrowserRules(),
    ) -> None:
        """:param rejected: called for each request that exceeds a limit of its key.

        :param browsers: rules for the time without keys.
        """
        self._app, self._access, self._rejected = app, access, rejected
        self._browsers = browsers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its :class:`RequestContext`, or answer 401, 403 or 429."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = served_path(scope)
        account: Account | None = None
        if self._access.keys.is_empty:
            refusal = self._browsers.refusal(path, scope)
        else:
            account = self._account(scope)
            refusal = self._refusal(path, account)
        if refusal is not None:
            self._tell_refused(scope, refusal, account)
            await refusal.response(path)(scope, receive, send)
            return
        tenant = account.key.tenant if account else ""
        clock = self._access.clock
        tracer = self._access.tracer
        trace = None
        if tracer is not None:
            trace = tracer.begin(path, scope["headers"], clock.now_seconds())
        request_id = _request_id(scope["headers"])
        visit = RequestContext(scope["method"], path, tenant, account, clock, trace, request_id)
        answer = _Answer(visit, send)
        scope.setdefault("state", {})["visit"] = visit
        try:
            if account is not None and _is_counted(scope):
                account.take_request(clock.now_seconds())
            await self._app(scope, receive, answer.send)
        except RateExceeded as error:
            if error.bound is not None:
                self._rejected(error.bound)
            await api_error(error).response(path)(scope, receive, answer.send)
        except Exception:
            answer.status = answer.status or SERVER_ERROR
            raise
        finally:
            ended = visit.end(answer.final_status)
            if self._access.observer is not None:
                self._access.observer.on_ended(ended)
            if trace is not None:
                trace.on_ended(ended, getattr(scope.get("route"), "path_format", ""))

    def _account(self, scope: Scope) -> Account | None:
        headers = scope["headers"]
        scheme, _, key = header_of(headers, b"authorization").partition(b" ")
        account = self._access.keys.find(key)
        if account is not None and scheme.lower() == b"bearer":
            return account
        return self._access.keys.find(header_of(headers, b"x-api-key"))

    def _refusal(self, path: str, account: Account | None) -> ApiError | None:
        if path in OPEN or (path == METRICS and not self._access.guards_metrics):
            return None
        if account is None:
            return NO_KEY
        needs_operator = path == METRICS or path.startswith(OPERATORS)
        return NO_OPERATOR if needs_operator and not account.key.is_operator else None

    def _tell_refused(self, scope: Scope, refusal: ApiError, account: Account | None) -> None:
        if self._access.observer is not None:
            client = scope.get("client") or ("", 0)
            tenant = account.key.tenant if account else ""
            self._access.observer.on_refused(
                scope["method"],
                served_path(scope),
                client[0],
                refusal.status,
                tenant,
                refusal.param or "",
            )


class _Answer:
    """An answer that is being sent: its status, and whether it is complete."""

    def __init__(self, visit: RequestContext, send: Send) -> None:
        self._visit, self._send = visit, send
        self.status = 0
        self._is_whole = False

    @property
    def final_status(self) -> int:
        """The status, or 499 for an incomplete answer that is not a server error."""
        is_failure = self.status >= SERVER_ERROR
        return self.status if self._is_whole or is_failure else CLIENT_GONE_STATUS

    async def send(self, message: Message) -> None:
        """Pass a message on, with the visit's headers in its head."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message).update(self._visit.headers())
        await self._send(message)
        if message["type"] == "http.response.body":
            self._is_whole = not message.get("more_body", False)


def _request_id(headers: Headers) -> str:
    sent = header_of(headers, b"x-request-id").decode("latin-1")
    is_fit = len(sent) <= LONGEST_REQUEST_ID and sent.isascii() and sent.isprintable()
    return sent if is_fit and " " not in sent else ""


def _is_counted(scope: Scope) -> bool:
    """Return whether a request counts against its key's requests per minute: if it costs work."""
    path = served_path(scope)
    return scope["method"] == "POST" and path not in OPEN and not path.startswith(OPERATORS)
