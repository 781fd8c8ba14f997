"""Middleware for browsers, proxies and probes: other origins, a root path, HEAD."""

from fastapi import FastAPI
from starlette._utils import get_route_path  # the router's function: guards must see the same path
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvell.server.api.door.face_options import FaceOptions, checked_root_path

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


def served_path(scope: Scope) -> str:
    return get_route_path(scope) or "/"


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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            is_body = message["type"] == "http.response.body"
            await send({**message, "body": b""} if is_body else message)

        await self._app({**scope, "method": "GET"}, receive, send_head)
