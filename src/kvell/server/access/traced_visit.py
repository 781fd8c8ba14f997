"""The record of a traced visit, kept until the visit and all its requests have ended."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.front.request_log import EndedRequest

TRACED = "/v1/"
"""The prefix of traced paths; pages that are polled would hide the other traces."""
CONTEXT_HEADERS = (b"traceparent", b"tracestate")
NANOSECONDS = 1_000_000_000


@dataclass(frozen=True)
class EndedVisit:
    """A request that is answered, or whose client closed the connection (status 499).

    :param answer_id: "" if no answer was begun; then all counts of tokens are 0.
    :param request_id: the request's ``x-request-id``, or else a random one.
    :param seconds: time from the request's head to the last byte of its answer.
    """

    method: str
    path: str
    tenant: str
    status: int
    seconds: float
    answer_id: str = ""
    model: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    request_id: str = ""


@dataclass(frozen=True)
class VisitRecord:
    """An ended visit and its requests in the front.

    :param parent: the client's headers of the W3C trace context; empty if it sent none.
    :param began_seconds: start by the monotonic clock of ``requests``.
    :param began_ns: start by the system's time of day.
    :param route: the API's path template; "" if none matches.
    :param asked: the model's name and the parameters; None if the body could not be read.
    """

    parent: Mapping[str, list[str]]
    began_seconds: float
    began_ns: int
    visit: EndedVisit
    route: str
    asked: tuple[str, SamplingParams] | None
    requests: Mapping[int, EndedRequest]

    def at_ns(self, clock_seconds: float) -> int:
        return self.began_ns + round((clock_seconds - self.began_seconds) * NANOSECONDS)


class TracedVisit:
    """The collector of one visit's record.

    ::

        begun ──► answers admitted ──each ends──┐
          └────────── visit ends ───────────────┴─last─► written

    If the client closes its connection, the visit ends before its requests do.
    """

    def __init__(
        self,
        parent: Mapping[str, list[str]],
        began_seconds: float,
        began_ns: int,
        write: Callable[[VisitRecord], None],
    ) -> None:
        self._parent, self._write = parent, write
        self._began_seconds, self._began_ns = began_seconds, began_ns
        self._asked: tuple[str, SamplingParams] | None = None
        self._requests: dict[int, EndedRequest] = {}
        self.awaited = 1  # the visit's own end
        self._visit: EndedVisit | None = None
        self._route = ""

    def on_parsed(self, model: str, sampling: SamplingParams) -> None:
        self._asked = model, sampling

    def on_ended(self, visit: EndedVisit, route: str) -> None:
        self._visit, self._route = visit, route
        self._settle()

    def on_answered(self, index: int, request: EndedRequest) -> None:
        self._requests[index] = request
        self._settle()

    def _settle(self) -> None:
        self.awaited -= 1
        if self.awaited or self._visit is None:
            return
        requests = dict(sorted(self._requests.items()))
        began = self._began_seconds, self._began_ns
        record = VisitRecord(self._parent, *began, self._visit, self._route, self._asked, requests)
        self._write(record)


class Tracer:
    """A factory of records of traced visits.

    :param write: called once with each record; must not block.
    :param wall_ns: returns the system's time of day.
    """

    def __init__(self, write: Callable[[VisitRecord], None], wall_ns: Callable[[], int]) -> None:
        self._write, self._wall_ns = write, wall_ns

    def begin(
        self, path: str, headers: Iterable[tuple[bytes, bytes]], now_seconds: float
    ) -> TracedVisit | None:
        """Return the trace of a visit that begins now; None if its path is not traced."""
        if not path.startswith(TRACED):
            return None
        parent: dict[str, list[str]] = {}
        for name, value in headers:
            if name in CONTEXT_HEADERS:
                parent.setdefault(name.decode(), []).append(value.decode("latin-1"))
        return TracedVisit(parent, now_seconds, self._wall_ns(), self._write)
