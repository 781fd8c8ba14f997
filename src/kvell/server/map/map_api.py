"""Routes of the memory map, ``/``, and of its data, ``/debug/pages`` and ``/debug/history``."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from fastapi import FastAPI, HTTPException, Path, Query, Response

from kvell.engine.protocol.statistics import Stats
from kvell.front.front import Front
from kvell.front.request_queue import Entries
from kvell.server.map.figures import (
    NO_LOANS,
    InstanceSnapshot,
    ServerLine,
    large_page_body,
    map_body,
)
from kvell.server.map.history import (
    HistoryRow,
    InstanceSample,
    ended_loans,
    sections_lent,
    transfer_rows,
)
from kvell.server.map.page import make_page
from kvell.server.map.recorder import HistoryRecorder, LatestAnswer
from kvell.server.metrics.front_metrics import ANSWER_SECONDS, answered_stats

REFRESH_SECONDS = 0.2
"""The shortest interval between two queries of the instances, for any number of viewers."""
DETAIL_SECONDS = 0.05
"""The shortest interval between two queries of single large pages."""
MOST_LARGE_PAGES = 1 << 31

JSON = "application/json"


@dataclass(frozen=True)
class ServerFacts:
    """Facts about a server that the memory map shows.

    :param contract_bytes: returns the most memory of all processes.
    :param links: relative addresses of pages that a browser can open without a key.
    """

    models: tuple[str, ...] = ()
    contract_bytes: Callable[[], int] = lambda: 0
    links: tuple[str, ...] = ()


class MapApi:
    """The handlers of the memory map."""

    def __init__(self, front: Front, recorder: HistoryRecorder, facts: ServerFacts) -> None:
        self._front, self._recorder, self._facts = front, recorder, facts
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

    async def history(self, after: Annotated[float, Query()] = 0.0) -> Response:
        """Return a row for each second of the last three minutes, the oldest first.

        ``after`` is a time of the server's clock: only later rows are returned.  ``fields`` names
        the columns of a row, and ``instance_fields`` those of each of its instances.
        """
        self._recorder.sample()
        body = {
            "at_seconds": self._front.now_seconds(),
            "fields": HistoryRow.__struct_fields__,
            "instance_fields": InstanceSample.__struct_fields__,
            "rows": self._recorder.history.rows_after(after),
        }
        return _uncached(msgspec.json.encode(body))

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
        app.add_api_route("/", self.page, methods=["GET"], include_in_schema=False)
        app.add_api_route("/debug/pages", self.pages, methods=["GET"])
        app.add_api_route("/debug/history", self.history, methods=["GET"])
        app.add_api_route("/debug/pages/{instance}/{large_page}", self.large_page, methods=["GET"])

    async def _look(self) -> bytes:
        pages, stats = await asyncio.gather(
            self._front.pages(ANSWER_SECONDS), answered_stats(self._front)
        )
        self._recorder.note_stats(stats)
        self._recorder.sample()
        loans = self._recorder.loans()
        history = self._recorder.history
        instances = [
            InstanceSnapshot(
                status,
                stats.get(status.instance_id),
                pages.get(status.instance_id),
                loans.get(status.instance_id, NO_LOANS),
                history.rungs_before(status.instance_id),
            )
            for status, _ in self._front.instances()
        ]
        entries = self._front.entries()
        before = {} if history.oldest is None else history.oldest.transfers
        transfers = transfer_rows(entries.in_flight, entries.transfers, before)
        ended = ended_loans(sections_lent(loans), history.loans())
        body = map_body(
            instances,
            entries,
            self._front.now_seconds(),
            self._line(entries, stats),
            [*transfers, *ended],
        )
        return msgspec.json.encode(body)

    def _line(self, entries: Entries, stats: dict[str, Stats]) -> ServerLine:
        history = self._recorder.history
        reports = [status.report for status, _ in self._front.instances() if status.report]
        return ServerLine(
            self._facts.models,
            reports[0].facts.dtype if reports else "",
            *history.rates(),
            sum(each.running for each in stats.values()),
            len(entries.waiting) + sum(each.waiting for each in stats.values()),
            *history.medians(),
            self._facts.contract_bytes(),
            self._facts.links,
        )


def _uncached(content: bytes) -> Response:
    return Response(content, media_type=JSON, headers={"Cache-Control": "no-store"})
