"""Routes of the memory map, ``/``, and of its data, ``/debug/pages``."""

import asyncio
from typing import Annotated

import msgspec
from fastapi import FastAPI, HTTPException, Path, Response

from kvell.engine.protocol.statistics import Stats
from kvell.errors import TryLater
from kvell.front.front import Front
from kvell.server.map.figures import InstanceSnapshot, large_page_body, map_body
from kvell.server.map.page import make_page
from kvell.server.map.refreshed import LatestAnswer

ANSWER_SECONDS = 2.0
"""An instance that does not answer within this time is shown without figures."""
REFRESH_SECONDS = 0.2
"""The shortest interval between two queries of the instances, for any number of viewers."""
DETAIL_SECONDS = 0.05
"""The shortest interval between two queries of single large pages."""
MOST_LARGE_PAGES = 1 << 31

JSON = "application/json"


class MapApi:
    """The handlers of the memory map."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._page = make_page()
        self._pages = LatestAnswer(self._look, front.now_seconds, REFRESH_SECONDS)
        self._detail = asyncio.Lock()

    async def page(self) -> Response:
        """Return the page of the memory map."""
        return Response(self._page.html, media_type="text/html", headers=self._page.headers)

    async def pages(self) -> Response:
        """Return the owners of each large page of each instance, as the memory map shows them.

        Columns are little-endian integers in base64.  An instance that does not answer is listed
        without figures.
        """
        return _uncached(await self._pages.latest())

    async def large_page(
        self,
        instance: Annotated[str, Path(max_length=100)],
        large_page: Annotated[int, Path(ge=0, lt=MOST_LARGE_PAGES)],
    ) -> Response:
        """Return the small pages of one large page and their owners.

        The status is 404 if no instance of this id serves, 429 if it does not answer in time.
        """
        async with self._detail:  # one query at a time, so that many viewers cost no more than one
            shown = await self._front.large_page(instance, large_page, ANSWER_SECONDS)
            await asyncio.sleep(DETAIL_SECONDS)
        if shown is None:
            raise HTTPException(404, "no instance with this id is serving")
        return _uncached(msgspec.json.encode(large_page_body(shown)))

    def install(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_api_route("/", self.page, methods=["GET"], include_in_schema=False)
        app.add_api_route("/debug/pages", self.pages, methods=["GET"])
        app.add_api_route("/debug/pages/{instance}/{large_page}", self.large_page, methods=["GET"])

    async def _look(self) -> bytes:
        pages, stats = await asyncio.gather(self._front.pages(ANSWER_SECONDS), self._stats())
        instances = [
            InstanceSnapshot(status, stats.get(status.instance_id), pages.get(status.instance_id))
            for status, _ in self._front.instances()
        ]
        body = map_body(instances, self._front.entries(), self._front.now_seconds())
        return msgspec.json.encode(body)

    async def _stats(self) -> dict[str, Stats]:
        try:
            return await self._front.stats(ANSWER_SECONDS)
        except TryLater:
            return {}


def _uncached(content: bytes) -> Response:
    return Response(content, media_type=JSON, headers={"Cache-Control": "no-store"})
