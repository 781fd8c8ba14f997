"""OpenTelemetry spans of complete records of visits."""

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvell.front.request_log import EndedRequest
from kvell.server.tracing.attributes import (
    answer_attributes,
    error_type,
    phases,
    span_name,
    visit_attributes,
)
from kvell.server.tracing.traced_visit import VisitRecord


class SpanWriter:
    """A writer of a span per visit, with a child span per phase of each answer.

    The parent is the span in the client's ``traceparent``.  Contexts are passed explicitly, so
    that other code of the process does not inherit them.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._headers = TraceContextTextMapPropagator()

    def write(self, record: VisitRecord) -> None:
        """Pass the spans of a record to the span processor."""
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
