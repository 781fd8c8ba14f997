"""What is known of a visit, kept until there is nothing more to learn of it."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.front.request_log import EndedRequest
from kvell.server.access.visit import EndedVisit

TRACED = "/v1/"
"""Paths below this are traced; pages that are asked for again and again would hide the rest."""
CONTEXT_HEADERS = (b"traceparent", b"tracestate")
NANOSECONDS = 1_000_000_000


@dataclass(frozen=True)
class VisitRecord:
    """A visit that is over, and all that the front did for it.

    :param parent: the client's headers of the W3C trace context; empty if it sent none.
    :param began_ns: of the system's time of day; ``requests`` have theirs by the same clock as
        ``began_seconds``.
    :param route: the path as the API writes it; "" if it serves none of this path.
    :param asked: the model's name and the parameters; None if the body could not be read.
    :param requests: by the index of their answer.
    """

    parent: Mapping[str, list[str]]
    began_seconds: float
    began_ns: int
    visit: EndedVisit
    route: str
    asked: tuple[str, SamplingParams] | None
    requests: Mapping[int, EndedRequest]

    def at_ns(self, clock_seconds: float) -> int:
        """The time of day when the clock showed so many seconds."""
        return self.began_ns + round((clock_seconds - self.began_seconds) * NANOSECONDS)


class TracedVisit:
    """Collects what the door, the handlers and the front tell (a ``VisitTrace``).

    ::

        begun ──► answers admitted ──each ends──┐
          └────────── visit ends ───────────────┴─last─► written

    A client that left is gone before the front hears that its requests ended.
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
        self._awaited = 1  # the visit's own end
        self._visit: EndedVisit | None = None
        self._route = ""

    def asked(self, model: str, sampling: SamplingParams) -> None:
        """It wants answers of a model; the parameters are those of its first prompt."""
        self._asked = model, sampling

    def answer(self, index: int) -> "TracedAnswer":
        """Whom the front tells of one answer."""
        return TracedAnswer(self, index)

    def ended(self, visit: EndedVisit, route: str) -> None:
        """The client has its answer, or left."""
        self._visit, self._route = visit, route
        self._settle()

    def _admitted(self) -> None:
        self._awaited += 1

    def _answered(self, index: int, request: EndedRequest) -> None:
        self._requests[index] = request
        self._settle()

    def _settle(self) -> None:
        self._awaited -= 1
        if self._awaited or self._visit is None:
            return
        requests = dict(sorted(self._requests.items()))
        began = self._began_seconds, self._began_ns
        record = VisitRecord(self._parent, *began, self._visit, self._route, self._asked, requests)
        self._write(record)


class TracedAnswer:
    """One answer of a visit (a ``RequestTrace``)."""

    def __init__(self, visit: TracedVisit, index: int) -> None:
        self._visit, self._index = visit, index

    def admitted(self) -> None:
        """The front has it, and will tell its end."""
        self._visit._admitted()

    def ended(self, request: EndedRequest) -> None:
        """It is over."""
        self._visit._answered(self._index, request)


class Tracer:
    """Begins a record for each visit that is traced (a ``VisitTracer``).

    :param write: is given each record once; it must not wait for anything.
    :param wall_ns: the system's time of day.
    """

    def __init__(
        self, write: Callable[[VisitRecord], None], wall_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._write, self._wall_ns = write, wall_ns

    def begin(
        self, path: str, headers: Iterable[tuple[bytes, bytes]], now_seconds: float
    ) -> TracedVisit | None:
        """Follow a visit that begins now; None if its path is not traced."""
        if not path.startswith(TRACED):
            return None
        parent: dict[str, list[str]] = {}
        for name, value in headers:
            if name in CONTEXT_HEADERS:
                parent.setdefault(name.decode(), []).append(value.decode("latin-1"))
        return TracedVisit(parent, now_seconds, self._wall_ns(), self._write)
