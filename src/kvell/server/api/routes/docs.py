"""``/docs``: the page of the API."""

import asyncio

from fastapi import FastAPI, Response

from kvell.server.api.bodies.docs_page import make_docs_page
from kvell.server.map.page import Page

PATH = "/docs"


class DocsApi:
    """The handler of the API's page, which is made when it is first asked for."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._page: Page | None = None
        self._making = asyncio.Lock()

    def install(self) -> None:
        """Add the route."""
        self._app.add_api_route(PATH, self.page, methods=["GET"], include_in_schema=False)

    async def page(self) -> Response:
        """Return the page of the API."""
        async with self._making:
            if self._page is None:
                self._page = await asyncio.to_thread(self._made)
        return Response(self._page.html, media_type="text/html", headers=self._page.headers)

    def _made(self) -> Page:
        return make_docs_page(self._app.openapi())
