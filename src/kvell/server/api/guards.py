"""What a request must pass before anything reads it: a key and a bounded body."""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvell.server.api.http_errors import ApiError, invalid_request

GUARDED = ("/v1/", "/cluster")
"""Paths that need the key begin so: what costs work, and what changes the server."""


class ApiKeyGuard:
    """Lets guarded paths through only with ``Authorization: Bearer <key>``."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._digest = _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        guarded = scope["type"] == "http" and scope["path"].startswith(GUARDED)
        if not guarded or self._allowed(scope["headers"]):
            await self._app(scope, receive, send)
            return
        message = "missing or wrong API key; send Authorization: Bearer <key>"
        error = ApiError(401, message, "invalid_request_error", code="invalid_api_key")
        await error.response()(scope, receive, send)

    def _allowed(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        # Digests have one length, so the comparison's time tells nothing about the key.
        return hmac.compare_digest(_digest(key), self._digest) and scheme.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class BodyLimit:
    """Reads a body up to a limit before the app sees it; answers 413 beyond."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its whole body, or answer 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = await self._read(scope, receive)
        if body is None:
            message = f"the body exceeds {self._max_body_bytes} bytes"
            await invalid_request(message, status=413).response()(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        announced = next((v for n, v in scope["headers"] if n == b"content-length"), b"0")
        if announced.isdigit() and int(announced) > self._max_body_bytes:
            return None
        body = bytearray()
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message["type"] == "http.request" and message.get("more_body", False)
            if len(body) > self._max_body_bytes:
                return None
        return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed
