"""What browsers, proxies and probes need: other origins, a path that is not the root, HEAD."""

from fastapi import FastAPI
from starlette._utils import get_route_path  # the router's own: a guard must see what it sees
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
"""Headers of answers that scripts of other origins may read."""


def install_browsers(app: FastAPI, options: FaceOptions) -> None:
    """Add what must stand outside of all guards: a preflight has no key.

    :raises ChangeSomething: if the root path is none.
    """
    asked = options.cross_origin
    if asked.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=asked.origins,
            allow_methods=asked.methods,
            allow_headers=asked.headers,
            allow_credentials=asked.credentials,
            allow_private_network=True,  # a page from elsewhere that asks a server at home
            expose_headers=EXPOSED,
        )
    if root_path := checked_root_path(options.root_path):
        app.add_middleware(UnderRoot, root_path=root_path)


def served_path(scope: Scope) -> str:
    """The path of a request without the one under which a proxy has this server."""
    return get_route_path(scope) or "/"


class UnderRoot:
    """Serves under a path of a proxy's, whether the proxy strips it or not.

    :param root_path: begins with a slash and does not end with one.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app, self._root_path = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its whole path."""
        if scope["type"] == "http":
            root, path = self._root_path, scope["path"]
            whole = path if path == root or path.startswith(f"{root}/") else root + path
            scope = {**scope, "root_path": root, "path": whole}
        await self._app(scope, receive, send)


class HeadAsGet:
    """Answers HEAD wherever GET is answered, with the same head and no body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass HEAD on as GET, and other requests as they are."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            is_body = message["type"] == "http.response.body"
            await send({**message, "body": b""} if is_body else message)

        await self._app({**scope, "method": "GET"}, receive, send_head)
