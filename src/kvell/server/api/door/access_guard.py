"""The door: which paths need which key, how many requests a key has, and what each visit used."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvell.clock import Clock, MonotonicClock
from kvell.errors import Bound
from kvell.server.access.accounts import RateExceeded
from kvell.server.access.keys import Holder, KeyRing
from kvell.server.access.visit import CLIENT_GONE_STATUS, Visit, VisitObserver, VisitTracer
from kvell.server.api.door.body_headers import header_of
from kvell.server.api.door.browsers import served_path
from kvell.server.api.http_errors import ApiError, api_error

OPEN = frozenset({"/", "/livez", "/readyz", "/health", "/ping", "/version"})
"""Paths that need no key; every other path needs one, also paths that are not served."""
METRICS = "/metrics"
OPERATORS = ("/cluster", "/debug", "/reset_prefix_cache")
"""Paths below these need an operator's key: they show or change the server itself."""
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
    """Who may do what on a server.

    :param keys: an empty ring lets everybody do everything.
    :param guards_metrics: whether ``/metrics`` needs an operator's key.
    :param observer: is told of refused keys and ended requests.
    :param tracer: follows requests that were let in.
    """

    keys: KeyRing = field(default_factory=lambda: KeyRing((), 0.0))
    guards_metrics: bool = False
    observer: VisitObserver | None = None
    clock: Clock = field(default_factory=MonotonicClock)
    tracer: VisitTracer | None = None


def visit_of(request: Request) -> Visit:
    """Who asks, as the door has seen it."""
    visit: Visit = request.state.visit
    return visit


class AccessGuard:
    """Lets a request in, follows it to its end, and settles what it used."""

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        rejected: Callable[[Bound], None] = lambda bound: None,
    ) -> None:
        """:param rejected: is told of each request that exceeds a limit of its key."""
        self._app, self._access, self._rejected = app, access, rejected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its :class:`Visit`, or answer 401, 403 or 429."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = served_path(scope)
        holder = self._holder(scope)
        refusal = None if self._access.keys.is_empty else self._refusal(path, holder)
        if refusal is not None:
            self._tell_refused(scope, refusal, holder)
            await refusal.response(path)(scope, receive, send)
            return
        tenant, account = (holder.key.tenant, holder.account) if holder else ("", None)
        clock, tracer = self._access.clock, self._access.tracer
        trace = None
        if tracer is not None:
            trace = tracer.begin(path, scope["headers"], clock.now_seconds())
        request_id = _request_id(scope["headers"])
        visit = Visit(scope["method"], path, tenant, account, clock, trace, request_id)
        await self._followed(visit, holder, scope, receive, send)

    async def _followed(
        self, visit: Visit, holder: Holder | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        answer = _Answer(visit, send)
        scope.setdefault("state", {})["visit"] = visit
        try:
            if holder is not None and _is_counted(scope):
                holder.account.take_request(self._access.clock.now_seconds())
            await self._app(scope, receive, answer.send)
        except RateExceeded as error:
            if error.bound is not None:
                self._rejected(error.bound)
            await api_error(error).response(served_path(scope))(scope, receive, answer.send)
        except Exception:
            answer.status = answer.status or SERVER_ERROR
            raise
        finally:
            ended = visit.end(answer.final_status)
            if self._access.observer is not None:
                self._access.observer.ended(ended)
            if visit.trace is not None:
                visit.trace.ended(ended, getattr(scope.get("route"), "path_format", ""))

    def _holder(self, scope: Scope) -> Holder | None:
        """Whose key was sent, to an open path too: the log names the tenant there as well."""
        if self._access.keys.is_empty:
            return None
        headers = scope["headers"]
        scheme, _, key = header_of(headers, b"authorization").partition(b" ")
        found = self._access.keys.find(key)
        if found is not None and scheme.lower() == b"bearer":
            return found
        return self._access.keys.find(header_of(headers, b"x-api-key"))

    def _refusal(self, path: str, holder: Holder | None) -> ApiError | None:
        if path in OPEN or (path == METRICS and not self._access.guards_metrics):
            return None
        if holder is None:
            return NO_KEY
        needs_operator = path == METRICS or path.startswith(OPERATORS)
        return NO_OPERATOR if needs_operator and not holder.key.is_operator else None

    def _tell_refused(self, scope: Scope, refusal: ApiError, holder: Holder | None) -> None:
        if self._access.observer is not None:
            client = scope.get("client") or ("", 0)
            tenant = holder.key.tenant if holder else ""
            self._access.observer.refused(
                scope["method"], served_path(scope), client[0], refusal.status, tenant
            )


class _Answer:
    """What went to the client: its status, and whether it is whole."""

    def __init__(self, visit: Visit, send: Send) -> None:
        self._visit, self._send = visit, send
        self.status = 0
        self._is_whole = False

    @property
    def final_status(self) -> int:
        """The status; 499 if the client left before it had the whole answer."""
        is_failure = self.status >= SERVER_ERROR
        return self.status if self._is_whole or is_failure else CLIENT_GONE_STATUS

    async def send(self, message: Message) -> None:
        """Pass a message on; the head also says what the key has left."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message).update(self._visit.headers())
        await self._send(message)
        if message["type"] == "http.response.body":
            self._is_whole = not message.get("more_body", False)


def _request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """``x-request-id`` as it was sent; "" if it is none that a line of the log can show."""
    sent = header_of(headers, b"x-request-id").decode("latin-1")
    is_fit = len(sent) <= LONGEST_REQUEST_ID and sent.isascii() and sent.isprintable()
    return sent if is_fit and " " not in sent else ""


def _is_counted(scope: Scope) -> bool:
    """Whether a request counts against the requests of a minute: only what costs work does."""
    path = served_path(scope)
    return scope["method"] == "POST" and path not in OPEN and not path.startswith(OPERATORS)
