"""A visit's record: written once, when the visit and all its admitted requests are over."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.server.access.traced_visit import TracedVisit, Tracer, VisitRecord
from kvell.server.access.visit import SequenceUse
from tests.server.tracing.records import BEGAN_NS, BEGAN_SECONDS, PARENT, SAMPLING, VISIT, request

HEADERS = [(b"host", b"x"), (b"traceparent", PARENT.encode()), (b"authorization", b"Bearer key")]


def begun(
    written: list[VisitRecord], headers: list[tuple[bytes, bytes]] | None = None
) -> TracedVisit:
    tracer = Tracer(written.append, lambda: BEGAN_NS)
    visit = tracer.begin("/v1/completions", HEADERS if headers is None else headers, BEGAN_SECONDS)
    assert visit is not None
    return visit


def test_it_has_what_each_of_them_told() -> None:
    written: list[VisitRecord] = []
    visit = begun(written)
    visit.on_parsed("m", SAMPLING)
    answers = [SequenceUse(trace=visit, index=index) for index in range(2)]
    for answer in answers:
        answer.on_admitted()
    ends = [request("stop"), request("length")]
    answers[1].on_ended(ends[1])
    answers[0].on_ended(ends[0])
    assert written == []
    visit.on_ended(VISIT, "/v1/completions")
    [record] = written
    assert (record.visit, record.route, record.asked) == (
        VISIT,
        "/v1/completions",
        ("m", SAMPLING),
    )
    assert list(record.requests.items()) == [(0, ends[0]), (1, ends[1])]
    assert (record.began_seconds, record.began_ns) == (BEGAN_SECONDS, BEGAN_NS)


def test_of_the_headers_only_the_trace_context_is_kept() -> None:
    written: list[VisitRecord] = []
    states = [(b"tracestate", b"a=1"), (b"tracestate", b"b=\xff")]
    begun(written, HEADERS + states).on_ended(VISIT, "")
    assert written[0].parent == {"traceparent": [PARENT], "tracestate": ["a=1", "b=\xff"]}


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/cluster", "/debug/pages", "/v10"])
def test_pages_that_are_polled_are_not_traced(path: str) -> None:
    assert Tracer(lambda _: None, lambda: BEGAN_NS).begin(path, HEADERS, 0.0) is None


def test_a_client_that_leaves_is_recorded_once_the_front_has_ended_its_request() -> None:
    written: list[VisitRecord] = []
    visit = begun(written)
    answer = SequenceUse(trace=visit, index=0)
    answer.on_admitted()
    visit.on_ended(VISIT, "/v1/completions")
    assert written == []
    answer.on_ended(request("cancelled"))
    assert [one.finished.reason for one in written[0].requests.values()] == ["cancelled"]


def test_an_answer_that_was_not_let_in_is_not_waited_for() -> None:
    written: list[VisitRecord] = []
    visit = begun(written)
    SequenceUse(trace=visit, index=0)
    visit.on_ended(VISIT, "/v1/completions")
    assert [one.requests for one in written] == [{}]


@given(order=st.permutations(range(5)), admitted_late=st.booleans())
def test_whatever_ends_last_it_is_written_once(order: list[int], admitted_late: bool) -> None:
    """Number 4 is the visit itself; answers may be admitted while others have ended."""
    written: list[VisitRecord] = []
    visit = begun(written)
    answers = [SequenceUse(trace=visit, index=index) for index in range(4)]
    early = answers[:2] if admitted_late else answers
    for answer in early:
        answer.on_admitted()
    late = [index for index in order if index < 4 and answers[index] not in early]
    known = [index for index in order if index not in late]
    for index in known[:-1]:
        answers[index].on_ended(request()) if index < 4 else visit.on_ended(VISIT, "")
    for index in late:
        answers[index].on_admitted()
        answers[index].on_ended(request())
    assert written == []
    last = known[-1]
    answers[last].on_ended(request()) if last < 4 else visit.on_ended(VISIT, "")
    assert [sorted(one.requests) for one in written] == [[0, 1, 2, 3]]


def test_times_of_the_clock_become_times_of_day() -> None:
    written: list[VisitRecord] = []
    begun(written).on_ended(VISIT, "")
    assert written[0].at_ns(BEGAN_SECONDS) == BEGAN_NS
    assert written[0].at_ns(BEGAN_SECONDS + 1.5) == BEGAN_NS + 1_500_000_000
