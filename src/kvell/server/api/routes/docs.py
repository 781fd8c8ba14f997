"""``/docs`` and ``/openapi.json``: the page of the API and its document."""

import asyncio

import msgspec
from fastapi import FastAPI, Response

from kvell.server.api.bodies.docs_page import make_docs_page
from kvell.server.api.bodies.pieces import JSON_TYPE
from kvell.server.map.page import Page

PATH = "/docs"
DOCUMENT_PATH = "/openapi.json"


class DocsApi:
    """The handlers of the API's page and document, which are made when they are first asked for.

    :param root_path: a proxy's path of this server; "" for none.
    """

    def __init__(self, app: FastAPI, root_path: str = "") -> None:
        self._app, self._root_path = app, root_path
        self._made: tuple[Page, bytes] | None = None
        self._making = asyncio.Lock()

    def install(self) -> None:
        """Add the routes."""
        for path, handler in ((PATH, self.page), (DOCUMENT_PATH, self.document)):
            self._app.add_api_route(path, handler, methods=["GET"], include_in_schema=False)

    async def page(self) -> Response:
        """Return the page of the API."""
        page, _ = await self._latest()
        return Response(page.html, media_type="text/html", headers=page.headers)

    async def document(self) -> Response:
        """Return the OpenAPI document."""
        _, document = await self._latest()
        return Response(document, media_type=JSON_TYPE)

    async def _latest(self) -> tuple[Page, bytes]:
        async with self._making:
            if self._made is None:
                self._made = await asyncio.to_thread(self._make)
            return self._made

    def _make(self) -> tuple[Page, bytes]:
        schema = self._app.openapi()
        at_root = {"servers": [{"url": self._root_path}]} if self._root_path else {}
        return make_docs_page(schema), msgspec.json.encode({**schema, **at_root})
