"""Export of spans to a collector over OTLP, in the background.

A thread of OpenTelemetry sends the spans.  Their queue is bounded and drops spans when it is full,
so serving never waits.  OpenTelemetry's ``OTEL_…`` variables apply to settings not made here.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import (
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvell.clock import Clock
from kvell.errors import ChangeSomething
from kvell.front.request_log import EndedRequest
from kvell.server.access.traced_visit import Tracer, VisitRecord
from kvell.server.logs.lines import tell
from kvell.server.logs.seldom import SeldomLine
from kvell.server.tracing.attributes import (
    answer_attributes,
    error_type,
    phases,
    span_name,
    visit_attributes,
)


class SpanWriter:
    """A writer of a span per visit, with a child span per phase of each answer.

    The parent is the span in the client's ``traceparent``.  Contexts are passed explicitly, so
    that other code of the process does not inherit them.
    """

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer
        self._headers = TraceContextTextMapPropagator()

    def write(self, record: VisitRecord) -> None:
        above = self._headers.extract(record.parent, Context())
        span = self._tracer.start_span(
            span_name(record),
            above,
            SpanKind.SERVER,
            visit_attributes(record),
            start_time=record.began_ns,
        )
        if span.is_recording():  # a sampler may drop it
            around = set_span_in_context(span, above)
            for index, request in record.requests.items():
                self._write_phases(record, around, index, request)
            if error_type(record) is not None:
                span.set_status(StatusCode.ERROR)
        span.end(record.at_ns(record.began_seconds + record.visit.seconds))

    def _write_phases(
        self, record: VisitRecord, around: Context, index: int, request: EndedRequest
    ) -> None:
        attributes = answer_attributes(index, request)
        for phase in phases(request):
            begin, end = (
                record.at_ns(request.arrived_seconds + seconds)
                for seconds in (phase.from_seconds, phase.to_seconds)
            )
            span = self._tracer.start_span(
                phase.name, around, SpanKind.INTERNAL, attributes, start_time=begin
            )
            span.end(end)


LONGEST_PROBLEM = 300


class Complaints(logging.Handler):
    """A handler that logs one warning a minute, with the number of suppressed warnings.

    The packages log several warnings for each batch that a dead collector does not accept.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(logging.WARNING)
        self._line = SeldomLine(clock)

    def emit(self, record: logging.LogRecord) -> None:
        untold = self._line.untold_if_due()
        if untold is not None:
            problem = record.getMessage()[:LONGEST_PROBLEM]
            tell(logger, logging.WARNING, "tracing_problem", problem=problem, untold=untold)


@contextmanager
def complaints_told() -> Iterator[None]:
    """Redirect the packages' warnings from stderr to the server's log while the block runs."""
    theirs = logging.getLogger("opentelemetry")
    handler = Complaints()
    theirs.addHandler(handler)
    try:
        yield
    finally:
        theirs.removeHandler(handler)


logger = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0
"""The time for sending queued spans to the collector at the end."""


@contextmanager
def exporting(
    endpoint: str,
    flush_seconds: float = FLUSH_SECONDS,
    make_exporter: Callable[[str], SpanExporter] = OTLPSpanExporter,
) -> Iterator[Tracer]:
    """Yield a tracer whose spans are exported; the rest is flushed at the end of the block.

    :raises ChangeSomething: when OpenTelemetry's variables contradict each other.
    """
    release = version("kvell")
    with complaints_told():
        provider = _provider(endpoint, make_exporter, release)
        try:
            yield Tracer(SpanWriter(provider.get_tracer("kvell", release)).write, time.time_ns)
        finally:
            _shut_down(provider, flush_seconds)


def _provider(
    endpoint: str, make_exporter: Callable[[str], SpanExporter], release: str
) -> TracerProvider:
    try:
        processor = BatchSpanProcessor(make_exporter(endpoint))
    except (ImportError, RuntimeError, ValueError) as error:
        problem = f"cannot be used ({error})"
        remedy = "correct these variables, or unset them"
        raise ChangeSomething("OTEL_*", "…", problem, remedy) from error
    provider = TracerProvider(resource=_resource(release), shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider


def _resource(release: str) -> Resource:
    own = Resource({SERVICE_NAME: "kvell", SERVICE_VERSION: release})
    return Resource.create(own.merge(OTELResourceDetector().detect()).attributes)


def _shut_down(provider: TracerProvider, flush_seconds: float) -> None:
    """Flush; a slower collector is abandoned, and the thread ends with the process."""
    ending = threading.Thread(target=provider.shutdown, name="kvell-traces-end", daemon=True)
    ending.start()
    ending.join(flush_seconds)
    if ending.is_alive():
        tell(logger, logging.WARNING, "traces_not_flushed", after_seconds=flush_seconds)
