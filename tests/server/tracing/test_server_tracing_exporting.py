"""Spans on their way to a collector: that is there, is away, is silent, or refuses them."""

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from kvell.clock import VirtualClock
from kvell.errors import ChangeSomething
from kvell.server.access.traced_visit import Tracer
from kvell.server.logs.lines import FIELDS
from kvell.server.tracing.exporting import LONGEST_PROBLEM, Complaints, complaints_told, exporting
from kvell.server.tracing.opening import traces_to
from tests.server.tracing.collector import DEADLINE_SECONDS, collecting
from tests.server.tracing.records import VISIT


def visited(tracer: Tracer, times: int = 1) -> None:
    for _ in range(times):
        visit = tracer.begin("/v1/completions", [], 0.0)
        assert visit is not None
        visit.on_ended(VISIT, "/v1/completions")


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if hasattr(record, FIELDS)]


@contextmanager
def silent_port() -> Iterator[int]:
    """Takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield silent.getsockname()[1]


class Stuck(SpanExporter):
    """An exporter that sends nothing before it is let go."""

    def __init__(self) -> None:
        self.is_busy, self.goes_on = threading.Event(), threading.Event()
        self.got = 0

    def export(self, spans: "list[ReadableSpan]") -> SpanExportResult:  # type: ignore[override]
        self.is_busy.set()
        assert self.goes_on.wait(DEADLINE_SECONDS)
        self.got += len(spans)
        return SpanExportResult.SUCCESS


def test_what_is_queued_at_the_end_still_goes_out() -> None:
    with collecting() as there:
        with traces_to(there.url) as tracer:
            visited(tracer, 700)
        assert len(there.spans) == 700
        assert there.headers[0]["content-type"] == "application/x-protobuf"


def test_the_resource_is_kvell_unless_the_environment_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with collecting() as there:
        with traces_to(there.url) as tracer:
            visited(tracer)
        assert there.resource["service.name"] == "kvell"
        assert there.resource["service.version"]
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=one,zone=b")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=t")
    with collecting() as there:
        with traces_to(there.url) as tracer:
            visited(tracer)
        assert (there.resource["service.name"], there.resource["zone"]) == ("mine", "b")
        assert there.headers[0]["x-token"] == "t"


def test_it_can_be_turned_off_as_every_user_of_opentelemetry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with collecting() as there:
        with traces_to(there.url) as tracer:
            visited(tracer)
        assert there.bodies == []


def test_a_collector_that_is_away_is_told_once_and_breaks_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    with traces_to(f"http://127.0.0.1:{port}") as tracer:
        visited(tracer, 1500)
    assert events(caplog) == ["tracing_problem"]


def test_a_collector_that_refuses_is_told_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with collecting(status=401) as there:
        with traces_to(there.url) as tracer:
            visited(tracer)
        [told] = [getattr(one, FIELDS) for one in caplog.records if hasattr(one, FIELDS)]
        assert "401" in told["problem"]


def test_a_silent_collector_is_left_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """Its own time is ten seconds for each batch; the end is not waited for that long."""
    with silent_port() as port, exporting(f"http://127.0.0.1:{port}/", 0.05) as tracer:
        visited(tracer, 600)
    assert events(caplog) == ["traces_not_flushed"]


def test_a_stuck_export_holds_nobody_up_and_the_oldest_are_dropped(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "50")
    stuck = Stuck()
    with exporting("unused", DEADLINE_SECONDS, lambda _: stuck) as tracer:
        visited(tracer, 50)
        assert stuck.is_busy.wait(DEADLINE_SECONDS)
        visited(tracer, 5000)
        assert stuck.got == 0
        stuck.goes_on.set()
    assert stuck.got == 150
    assert events(caplog) == ["tracing_problem"]


def test_a_variable_that_makes_no_sense_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "zip")
    with collecting() as there:
        with traces_to(there.url) as tracer:
            visited(tracer)
        assert len(there.spans) == 1
    [told] = [getattr(one, FIELDS) for one in caplog.records if hasattr(one, FIELDS)]
    assert "zip" in told["problem"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "10"),
        ("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER", "nobody"),
    ],
)
def test_variables_that_cannot_be_used_are_told_before_the_start(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue must hold a batch; a credential provider must be installed."""
    monkeypatch.setenv(name, value)
    with pytest.raises(ChangeSomething, match=r"^OTEL_\*=…: cannot be used \("):
        traces_to("http://127.0.0.1:4318").__enter__()


def test_complaints_are_told_once_a_minute_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    handler, theirs = Complaints(clock), logging.getLogger("opentelemetry.anything")
    logging.getLogger("opentelemetry").addHandler(handler)
    try:
        theirs.debug("nothing")
        for number in range(5):
            theirs.warning("away %d %s", number, "x" * 1000)
        clock.advance(61.0)
        theirs.error("still away")
    finally:
        logging.getLogger("opentelemetry").removeHandler(handler)
    first, second = [getattr(one, FIELDS) for one in caplog.records if hasattr(one, FIELDS)]
    assert first["problem"].startswith("away 0 x")
    assert len(first["problem"]) == LONGEST_PROBLEM
    assert (first["untold"], second) == (0, {"problem": "still away", "untold": 4})


def test_the_loggers_are_left_as_they_were() -> None:
    theirs = logging.getLogger("opentelemetry")
    before = list(theirs.handlers)
    with complaints_told():
        assert len(theirs.handlers) == len(before) + 1
    assert theirs.handlers == before
