"""A log and counts of requests: lines for refused keys, and optionally for ended requests."""

import logging
from collections.abc import Callable

from kvell.clock import Clock
from kvell.server.access.traced_visit import EndedVisit
from kvell.server.access.visit import is_monitoring
from kvell.server.logs.lines import tell
from kvell.server.logs.seldom import SeldomLine

logger = logging.getLogger(__name__)

REFUSALS_PER_MINUTE = 60
"""The most lines of refused keys and pages, so that a client with many keys cannot fill a disk."""
LONGEST_PATH = 100
LEAST_FAILURE = 400
"""The lowest status of a failure."""


class VisitLines:
    """A log of visits.

    Probes, scrapes and other reads of the server's state get a line only if they failed.

    :param tells_requests: whether ended requests get a line.
    :param count: called with the path and status of each request, including refused ones.
    """

    def __init__(
        self,
        *,
        tells_requests: bool,
        clock: Clock | None = None,
        count: Callable[[str, int], None] = lambda path, status: None,
    ) -> None:
        self._tells_requests, self._count = tells_requests, count
        self._refusals = SeldomLine(clock, REFUSALS_PER_MINUTE)

    def on_refused(
        self, method: str, path: str, client: str, status: int, tenant: str, header: str = ""
    ) -> None:
        """Record a request whose key is missing or wrong (401), or has no permission (403).

        :param header: the header that shows a foreign page, if that is the reason.
        """
        self._count(path, status)
        untold = self._refusals.untold_if_due()
        if untold is None:
            return
        fields = {"method": method, "path": path[:LONGEST_PATH], "client": client}
        if tenant:
            fields["tenant"] = tenant
        counts = {"status": status, "untold": untold}
        if header:
            tell(logger, logging.WARNING, "page_refused", **fields, header=header, **counts)
        else:
            tell(logger, logging.WARNING, "key_refused", **fields, **counts)

    def on_ended(self, visit: EndedVisit) -> None:
        self._count(visit.path, visit.status)
        if not self._tells_requests:
            return
        if visit.status < LEAST_FAILURE and is_monitoring(visit.method, visit.path):
            return
        fields: dict[str, object] = {"method": visit.method, "path": visit.path[:LONGEST_PATH]}
        if visit.tenant:
            fields["tenant"] = visit.tenant
        fields |= {"status": visit.status, "seconds": round(visit.seconds, 6)}
        if visit.answer_id:
            fields |= {"id": visit.answer_id, "model": visit.model}
            fields |= {
                "prompt_tokens": visit.prompt_tokens,
                "output_tokens": visit.output_tokens,
                "cached_tokens": visit.cached_tokens,
            }
        if visit.request_id:
            fields["request_id"] = visit.request_id
        tell(logger, logging.INFO, "request_ended", **fields)
