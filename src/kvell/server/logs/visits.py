"""Counts requests; a line for each refused key, and for each that ended if that is asked for."""

import logging
from collections.abc import Callable

from kvell.clock import Clock, MonotonicClock
from kvell.server.access.rates import Bucket
from kvell.server.access.visit import EndedVisit
from kvell.server.logs.lines import tell

logger = logging.getLogger(__name__)

REFUSALS_PER_MINUTE = 60
"""Refused keys that get a line; who tries many keys must not fill a disk."""
LONGEST_PATH = 100


class VisitLines:
    """Writes about visits (a ``VisitObserver``).

    :param tells_requests: whether requests get a line when they end.
    :param count: is told the path and status of every request, refused ones too.
    """

    def __init__(
        self,
        *,
        tells_requests: bool,
        clock: Clock | None = None,
        count: Callable[[str, int], None] = lambda path, status: None,
    ) -> None:
        self._tells_requests, self._count = tells_requests, count
        self._clock = clock or MonotonicClock()
        self._refusals = Bucket(REFUSALS_PER_MINUTE, self._clock.now_seconds())
        self._untold = 0

    def refused(self, method: str, path: str, client: str, status: int, tenant: str) -> None:
        """A key was missing or wrong (401), or may not do this (403); the key is never told."""
        self._count(path, status)
        if not self._refusals.take(1, self._clock.now_seconds()):
            self._untold += 1
            return
        fields = {"method": method, "path": path[:LONGEST_PATH], "client": client}
        if tenant:
            fields["tenant"] = tenant
        tell(logger, logging.WARNING, "key_refused", **fields, status=status, untold=self._untold)
        self._untold = 0

    def ended(self, visit: EndedVisit) -> None:
        """A request that was let in is over."""
        self._count(visit.path, visit.status)
        if not self._tells_requests:
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
