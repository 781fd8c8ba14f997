"""What a body must pass before anything reads it: bounds of its length and its breadth."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvell.errors import Bound, ChangeSomething
from kvell.server.access.bodies import BodyBounds, check_body
from kvell.server.api.http_errors import api_error, invalid_request


class BodyLimit:
    """Reads a body up to a limit before the app sees it; answers 413 beyond.

    :param bounds: of the JSON in it; None looks at the length alone.
    :param by_path: bounds of paths that have their own.
    :param rejected: is told of each body that exceeds a bound.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_body_bytes: int,
        bounds: BodyBounds | None = None,
        by_path: Mapping[str, BodyBounds] = MappingProxyType({}),
        rejected: Callable[[Bound], None] = lambda bound: None,
    ) -> None:
        self._app = app
        self._max_body_bytes, self._bounds = max_body_bytes, bounds
        self._rejected = rejected
        self._by_path = by_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its whole body, or answer 413 or 400."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = await self._read(scope, receive)
        if body is None:
            self._rejected("body_bytes")
            message = f"the body exceeds {self._max_body_bytes} bytes"
            await invalid_request(message, status=413).response()(scope, receive, send)
            return
        try:
            bounds = self._by_path.get(scope.get("path", ""), self._bounds)
            if body and bounds is not None:
                check_body(body, bounds)
        except ChangeSomething as error:
            if error.bound is not None:
                self._rejected(error.bound)
            await api_error(error).response()(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        announced = next((v for n, v in scope["headers"] if n == b"content-length"), b"0")
        if announced.isdigit() and int(announced) > self._max_body_bytes:
            return None
        body: bytes | bytearray = b""
        more = True
        while more:
            message = await receive()
            piece = message.get("body", b"")
            more = message["type"] == "http.request" and message.get("more_body", False)
            if not body:  # a body that comes in one piece is not copied
                body = bytearray(piece) if more else piece
            else:
                body += piece
            if len(body) > self._max_body_bytes:
                return None
        return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed
