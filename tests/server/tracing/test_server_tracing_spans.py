"""Records as spans, kept in memory: names, kinds, times, parents, status and sampling."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler
from opentelemetry.trace import SpanKind, StatusCode

from kvell.server.access.traced_visit import VisitRecord
from kvell.server.tracing.attributes import visit_attributes
from kvell.server.tracing.exporting import SpanWriter
from tests.server.tracing.records import BEGAN_NS, PARENT, VISIT, record, request

NOT_SAMPLED = PARENT[:-2] + "00"


class Written:
    def __init__(self, sampler: Sampler | None = None) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler, shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.writer = SpanWriter(self.provider.get_tracer("kvell"))

    def spans(self, one: VisitRecord) -> tuple[ReadableSpan, list[ReadableSpan]]:
        self.writer.write(one)
        *below, visit = self.exporter.get_finished_spans()
        return visit, below


@pytest.fixture
def written() -> Iterator[Written]:
    made = Written()
    yield made
    made.provider.shutdown()


def context(span: ReadableSpan) -> trace.SpanContext:
    told: trace.SpanContext | None = span.context
    assert told is not None
    return told


def test_a_visit_is_a_servers_span_with_its_times_and_attributes(written: Written) -> None:
    one = record(request())
    visit, _ = written.spans(one)
    assert (visit.name, visit.kind) == ("POST /v1/completions", SpanKind.SERVER)
    assert (visit.start_time, visit.end_time) == (BEGAN_NS, BEGAN_NS + 3_000_000_000)
    told = {
        name: list(v) if isinstance(v, tuple) else v for name, v in visit_attributes(one).items()
    }
    seen = dict(visit.attributes or {})
    assert {n: list(v) if isinstance(v, tuple) else v for n, v in seen.items()} == told
    assert visit.status.status_code == StatusCode.UNSET
    assert visit.parent is None


def test_phases_are_below_it_at_their_times(written: Written) -> None:
    visit, below = written.spans(record(request()))
    assert [(span.name, span.kind) for span in below] == [
        (name, SpanKind.INTERNAL) for name in ("queue", "prefill", "decode")
    ]
    arrived = BEGAN_NS + 500_000_000
    times = [(span.start_time, span.end_time) for span in below]
    ends = [arrived + round(seconds * 1e9) for seconds in (0.0, 0.75, 1.5, 2.5)]
    assert times == list(itertools.pairwise(ends))
    for span in below:
        assert span.parent is not None
        assert span.parent.span_id == context(visit).span_id
        assert context(span).trace_id == context(visit).trace_id
        assert dict(span.attributes or {})["kvell.instance"] == "mixed-0"


def test_each_answer_has_phases_of_its_own(written: Written) -> None:
    _, below = written.spans(record(request(), request(instance="mixed-1")))
    told = [(s.name, dict(s.attributes or {})["kvell.choice"]) for s in below]
    assert told == [(name, n) for n in range(2) for name in ("queue", "prefill", "decode")]


def test_the_clients_trace_goes_on(written: Written) -> None:
    visit, below = written.spans(record(request(), parent=PARENT))
    assert visit.parent is not None
    assert visit.parent.is_remote
    told = f"{context(visit).trace_id:032x}", f"{visit.parent.span_id:016x}"
    assert told == (PARENT.split("-")[1], PARENT.split("-")[2])
    assert {context(span).trace_id for span in below} == {context(visit).trace_id}


@pytest.mark.parametrize(
    "parent", ["", "rubbish", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 999]
)
def test_what_is_no_trace_context_begins_a_trace(written: Written, parent: str) -> None:
    visit, _ = written.spans(record(request(), parent=parent))
    assert visit.parent is None


def test_visits_have_traces_of_their_own_and_leave_no_context_behind(written: Written) -> None:
    written.writer.write(record(request(), parent=PARENT))
    written.writer.write(record(request()))
    written.writer.write(record(request()))
    traces = {context(span).trace_id for span in written.exporter.get_finished_spans()}
    assert len(traces) == 3
    assert not trace.get_current_span().get_span_context().is_valid


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (200, StatusCode.UNSET),
        (404, StatusCode.UNSET),
        (499, StatusCode.ERROR),
        (500, StatusCode.ERROR),
    ],
)
def test_failures_set_the_status(written: Written, status: int, code: StatusCode) -> None:
    visit, _ = written.spans(record(visit=replace(VISIT, status=status)))
    assert visit.status.status_code == code


def test_a_stream_that_failed_behind_its_head_sets_it_too(written: Written) -> None:
    visit, below = written.spans(record(request("error", first=None)))
    assert visit.status.status_code == StatusCode.ERROR
    assert dict(visit.attributes or {})["error.type"] == "error"
    assert {span.status.status_code for span in below} == {StatusCode.UNSET}


def test_what_a_sampler_or_the_client_does_not_want_is_not_kept(written: Written) -> None:
    written.writer.write(record(request(), parent=NOT_SAMPLED))
    assert written.exporter.get_finished_spans() == ()
    off = Written(ParentBased(ALWAYS_OFF))
    off.writer.write(record(request()))
    assert off.exporter.get_finished_spans() == ()
    off.writer.write(record(request(), parent=PARENT))
    assert len(off.exporter.get_finished_spans()) == 4
    off.provider.shutdown()
