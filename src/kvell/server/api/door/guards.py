"""Middleware that bounds requests: size and duration of a body, and number of requests."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from types import MappingProxyType

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

from kvell.errors import Bound, ChangeSomething, TryLater
from kvell.server.access.bodies import BodyBounds, check_body
from kvell.server.access.visit import WATCHED, RequestContext
from kvell.server.api.door.access_guard import (
    decompress,
    json_headers,
    refused_encoding,
    refused_type,
)
from kvell.server.api.door.http_bounds import DEFAULT, HttpBounds
from kvell.server.api.http_errors import ApiError, api_error, invalid_request, served_path
from kvell.server.text.lanes import TextWork
from kvell.wire.decoding import MalformedError, decode

LONG_BODY_BYTES = 64 << 10
"""Longer bodies are checked in a thread, one at a time, and begin to be parsed in that order."""
TOO_SLOW = ApiError(408, "the body did not arrive in time", "timeout_error")


class ServedLimit:
    """The middleware that answers 503 while too many requests await their answers.

    It runs after ``BodyLimit``, so a request without its whole body takes no place.  Probes and
    scrapes are always answered: a busy server is healthy, and must stay observable.

    :param most: number of requests that may await their answers at the same time.
    :param rejected: called for each request that exceeds the limit.
    """

    def __init__(
        self,
        app: ASGIApp,
        most: int,
        rejected: Callable[[Bound], None] = lambda bound: None,
    ) -> None:
        self._app, self._most, self._rejected = app, most, rejected
        self._served = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 503."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._served >= self._most and served_path(scope) not in WATCHED:
            self._rejected("connections")
            message = f"{self._most} requests await their answers; retry in a moment"
            error = ApiError(503, message, "service_unavailable_error")
            await error.response(served_path(scope))(scope, receive, send)
            return
        self._served += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._served -= 1


class BodyLimit:
    """The middleware that reads a body before the app runs, and answers 413 if it is too long.

    If the client disconnects before the end of the body, the request never reaches the app.  A body
    that takes too long is answered with 408.

    :param http: has the time that a body may take.
    :param bounds: bounds of the JSON; None checks neither the JSON nor its content type.
    :param by_path: bounds of paths that differ from ``bounds``.
    :param rejected: called for each body that exceeds a bound.
    :param work: the threads that decompress and check bodies, in turn by tenant.
    :param reads: whether a request has a handler; a body without one, for example to an unknown
        path, is not read.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_body_bytes: int,
        bounds: BodyBounds | None = None,
        by_path: Mapping[str, BodyBounds] = MappingProxyType({}),
        http: HttpBounds = DEFAULT,
        rejected: Callable[[Bound], None] = lambda bound: None,
        reads: Callable[[Scope], bool] = lambda scope: True,
        work: TextWork | None = None,
    ) -> None:
        self._app, self._reads = app, reads
        self._work = work or TextWork()
        self._max_body_bytes, self._bounds = max_body_bytes, bounds
        self._rejected = rejected
        self._by_path, self._http = by_path, http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its whole body, or answer 400, 408, 413, 415 or 429."""
        if scope["type"] != "http" or not self._reads(scope):  # refused, whatever its body is
            await self._app(scope, receive, send)
            return
        try:
            body = await self._plain(scope, receive)
        except _LeftError:
            return
        except _RefusedError as refused:
            await refused.error.response(served_path(scope))(scope, receive, send)
            return
        except TimeoutError:
            self._rejected("slow_client")
            response = TOO_SLOW.response(served_path(scope))
            response.headers["connection"] = "close"  # the rest of the body may still arrive
            await response(scope, receive, send)
            return
        try:
            bounds = self._by_path.get(served_path(scope), self._bounds)
            if bounds is not None and len(body) > LONG_BODY_BYTES:
                await self._work_of(scope).run_body(len(body), partial(check_body, body, bounds))
            elif body and bounds is not None:
                check_body(body, bounds)
        except (ChangeSomething, TryLater) as error:
            if error.bound is not None:
                self._rejected(error.bound)
            await api_error(error).response(served_path(scope))(scope, receive, send)
            return
        if body:
            scope["headers"] = json_headers(scope["headers"])
        await self._app(scope, _replay(body, receive), send)

    async def _plain(self, scope: Scope, receive: Receive) -> bytes:
        """Return the whole body, decompressed.

        :raises _RefusedError: if the headers are not supported, or the body is too long.
        """
        values = dict(reversed(scope["headers"]))  # the first value of each header
        encoding = values.get(b"content-encoding", b"").strip().lower()
        if encoding == b"identity":
            encoding = b""
        if encoding and (refused := refused_encoding(encoding)):
            raise _RefusedError(refused)
        read = await self._read(values.get(b"content-length", b""), receive)
        plain: bytes | ApiError | None = read
        if read and encoding:
            plain = await self._decompressed(scope, read, encoding)
        if plain is not None and self._bounds is not None and (plain or scope["method"] == "POST"):
            kind = values.get(b"content-type", b"")
            plain = refused_type(kind, has_body=bool(plain)) or plain
        if plain is None:
            self._rejected("body_bytes")
            message = f"the body exceeds {self._max_body_bytes} bytes"
            plain = invalid_request(message, status=413)
        if isinstance(plain, ApiError):
            raise _RefusedError(plain)
        return plain

    async def _decompressed(
        self, scope: Scope, body: bytes, encoding: bytes
    ) -> bytes | ApiError | None:
        """Return the body decompressed, or an error; None if it is too long."""
        decode = partial(decompress, body, encoding, self._max_body_bytes)
        try:
            return await self._work_of(scope).run_body(len(body), decode)
        except TryLater as error:
            self._rejected("body_bytes")
            return api_error(error)

    def _work_of(self, scope: Scope) -> TextWork:
        visit: RequestContext | None = scope.get("state", {}).get("visit")
        return self._work.of(visit.tenant if visit is not None else "")

    async def _read(self, length: bytes, receive: Receive) -> bytes | None:
        if length.isdigit() and int(length) > self._max_body_bytes:
            return None
        began_seconds = asyncio.get_running_loop().time()
        body: bytes | bytearray = b""
        async with asyncio.timeout(self._http.body_seconds) as due:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _LeftError
                piece, more = message.get("body", b""), message.get("more_body", False)
                if not body:  # do not copy a body of one piece
                    body = bytearray(piece) if more else piece
                else:
                    body += piece
                if len(body) > self._max_body_bytes:
                    return None
                if not more:
                    return bytes(body)
                due.reschedule(began_seconds + self._http.seconds_for_body(len(body)))


class _RefusedError(Exception):
    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


class _LeftError(Exception):
    """A disconnect of the client before its body was complete."""


def _replay(body: bytes, receive: Receive) -> Receive:
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed


_VALUES = msgspec.json.Decoder(object)


class LongBodyRoute(APIRoute):
    """A route whose handler gets its body from msgspec if it is long."""

    @override
    def get_route_handler(self) -> Callable[[Request], Coroutine[object, object, Response]]:
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            return await handle(_QuickRequest(request.scope, request.receive))

        return handle_parsed


class _QuickRequest(Request):
    @override
    async def json(self) -> object:
        """Return the body's value; errors, and numbers that only Python reads, are Python's."""
        body = await self.body()
        if len(body) <= LONG_BODY_BYTES:
            return await super().json()
        try:
            value = decode(_VALUES, body)
        except MalformedError:
            return await super().json()
        await asyncio.sleep(0)  # its validation has a turn of the event loop of its own
        return value
