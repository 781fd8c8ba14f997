"""Access control: keys of paths, request limits of keys, and usage of each request."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvell.clock import Clock, MonotonicClock
from kvell.errors import Bound
from kvell.server.access.accounts import RateExceeded
from kvell.server.access.keys import Holder, KeyRing
from kvell.server.access.visit import CLIENT_GONE_STATUS, RequestContext, VisitObserver, VisitTracer
from kvell.server.api.door.browser_rules import BrowserRules, header_of
from kvell.server.api.http_errors import ApiError, api_error, served_path

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
    observer: VisitObserver | None = None
    clock: Clock = field(default_factory=MonotonicClock)
    tracer: VisitTracer | None = None


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
        browsers: BrowserRules = BrowserRules(),  # noqa: B008 - it is frozen
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
        holder = self._holder(scope)
        if self._access.keys.is_empty:
            refusal = self._browsers.refusal(path, scope)
        else:
            refusal = self._refusal(path, holder)
        if refusal is not None:
            self._tell_refused(scope, refusal, holder)
            await refusal.response(path)(scope, receive, send)
            return
        tenant, account = (holder.key.tenant, holder.account) if holder else ("", None)
        clock = self._access.clock
        tracer = self._access.tracer
        trace = None
        if tracer is not None:
            trace = tracer.begin(path, scope["headers"], clock.now_seconds())
        request_id = _request_id(scope["headers"])
        visit = RequestContext(scope["method"], path, tenant, account, clock, trace, request_id)
        await self._followed(visit, holder, scope, receive, send)

    async def _followed(
        self,
        visit: RequestContext,
        holder: Holder | None,
        scope: Scope,
        receive: Receive,
        send: Send,
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
                self._access.observer.on_ended(ended)
            if visit.trace is not None:
                visit.trace.on_ended(ended, getattr(scope.get("route"), "path_format", ""))

    def _holder(self, scope: Scope) -> Holder | None:
        if self._access.keys.is_empty:
            return None
        headers = scope["headers"]
        scheme, _, key = header_of(headers, b"authorization").partition(b" ")
        holder = self._access.keys.find(key)
        if holder is not None and scheme.lower() == b"bearer":
            return holder
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


def _request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    sent = header_of(headers, b"x-request-id").decode("latin-1")
    is_fit = len(sent) <= LONGEST_REQUEST_ID and sent.isascii() and sent.isprintable()
    return sent if is_fit and " " not in sent else ""


def _is_counted(scope: Scope) -> bool:
    """Return whether a request counts against its key's requests per minute: if it costs work."""
    path = served_path(scope)
    return scope["method"] == "POST" and path not in OPEN and not path.startswith(OPERATORS)
