"""Spans to a collector over OTLP, in the background.

The queue of spans is bounded and drops what it cannot hold, and a thread of OpenTelemetry's own
sends them: serving waits for nothing.  Its ``OTEL_…`` variables hold for all that is not set here.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import (
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from kvell.errors import ChangeSomething
from kvell.server.logs.lines import tell
from kvell.server.tracing.complaints import complaints_told
from kvell.server.tracing.spans import SpanWriter
from kvell.server.tracing.traced_visit import Tracer

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0
"""What is still queued at the end has so long to reach the collector."""


@contextmanager
def exported(
    endpoint: str,
    flush_seconds: float = FLUSH_SECONDS,
    make_exporter: Callable[[str], SpanExporter] = OTLPSpanExporter,
) -> Iterator[Tracer]:
    """Export what is traced while the block runs, and what is left of it at its end.

    :param endpoint: where the collector takes traces.
    :raises ChangeSomething: when variables of OpenTelemetry's contradict each other.
    """
    release = version("kvell")
    with complaints_told():
        provider = _provider(endpoint, make_exporter, release)
        try:
            yield Tracer(SpanWriter(provider.get_tracer("kvell", release)).write)
        finally:
            _shut_down(provider, flush_seconds)


def _provider(
    endpoint: str, make_exporter: Callable[[str], SpanExporter], release: str
) -> TracerProvider:
    """Not made the process's own: FastAPI would make spans of its own there."""
    try:
        processor = BatchSpanProcessor(make_exporter(endpoint))
    except (ImportError, RuntimeError, ValueError) as error:
        problem, remedy = f"cannot be used ({error})", "correct these variables, or unset them"
        raise ChangeSomething("OTEL_*", "…", problem, remedy) from error
    provider = TracerProvider(resource=_resource(release), shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider


def _resource(release: str) -> Resource:
    own = Resource({SERVICE_NAME: "kvell", SERVICE_VERSION: release})
    return Resource.create(own.merge(OTELResourceDetector().detect()).attributes)


def _shut_down(provider: TracerProvider, flush_seconds: float) -> None:
    """Flush; a collector that takes longer is left, and the thread ends with the process."""
    ending = threading.Thread(target=provider.shutdown, name="kvell-traces-end", daemon=True)
    ending.start()
    ending.join(flush_seconds)
    if ending.is_alive():
        tell(logger, logging.WARNING, "traces_not_flushed", after_seconds=flush_seconds)
