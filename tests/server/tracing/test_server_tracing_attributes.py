"""What spans say of a record: names and values, phases, and when a visit counts as failed."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.server.access.traced_visit import EndedVisit
from kvell.server.tracing.attributes import (
    Phase,
    answer_attributes,
    error_type,
    phases,
    span_name,
    visit_attributes,
)
from kvell.vocabulary import FinishReason
from tests.server.tracing.records import VISIT, record, request

SECONDS = st.floats(0.0, 1000.0)


def test_a_whole_answer_has_all_attributes_and_no_others() -> None:
    assert visit_attributes(record(request())) == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/completions",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvell",
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 16,
        "gen_ai.response.id": "cmpl-1",
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 11,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.latency.time_in_queue": 0.75,
        "gen_ai.latency.time_to_first_token": 1.5,
        "gen_ai.latency.e2e": 3.0,
        "kvell.cached_tokens": 8,
        "kvell.preemptions": 1,
        "kvell.retries": 0,
        "kvell.instance": "mixed-0",
    }


def test_of_several_answers_the_longest_wait_and_the_first_token_are_told() -> None:
    late = request("stop", first=2.0, line=1.0, instance="mixed-1", attempt=2)
    told = visit_attributes(record(request(), late, request("cancelled", first=None)))
    assert told["gen_ai.response.finish_reasons"] == ["length", "stop", "cancelled"]
    assert told["gen_ai.latency.time_in_queue"] == 1.5
    assert told["gen_ai.latency.time_to_first_token"] == 1.5
    assert (told["kvell.preemptions"], told["kvell.retries"]) == (3, 2)
    assert told["kvell.instance"] == "mixed-0,mixed-1"


def test_what_nobody_told_is_left_out() -> None:
    bare = EndedVisit("GET", "/v1/models", "", 200, 0.1)
    assert visit_attributes(record(visit=bare, route="/v1/models", asked=None)) == {
        "http.request.method": "GET",
        "http.response.status_code": 200,
        "http.route": "/v1/models",
    }
    waiting = visit_attributes(record(request("cancelled", first=None, instance="")))
    assert not {"gen_ai.latency.time_to_first_token", "kvell.instance"} & waiting.keys()


@pytest.mark.parametrize(
    ("route", "operation"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/responses", "chat"),
        ("/v1/messages", "chat"),
        ("/v1/completions", "text_completion"),
        ("/v1/embeddings", "embeddings"),
        ("/v1/models", None),
    ],
)
def test_operations_have_the_conventions_names(route: str, operation: str | None) -> None:
    assert visit_attributes(record(route=route)).get("gen_ai.operation.name") == operation


def test_spans_have_few_names_whatever_clients_send() -> None:
    assert span_name(record()) == "POST /v1/completions"
    unknown = replace(VISIT, method="BREW", path="/v1/secrets-of-mine")
    assert span_name(record(visit=unknown, route="")) == "HTTP"
    assert visit_attributes(record(visit=unknown, route=""))["http.request.method"] == "_OTHER"
    assert "secrets-of-mine" not in str(visit_attributes(record(visit=unknown, route="")))


@pytest.mark.parametrize(
    ("status", "reasons", "error"),
    [
        (200, ["stop", "length"], None),
        (200, ["stop", "error", "cancelled"], "error"),
        (200, ["refused", "cancelled"], "refused"),
        (200, ["cancelled"], "cancelled"),
        (200, [], None),
        (400, ["refused"], None),
        (404, [], None),
        (408, ["cancelled"], None),
        (429, [], None),
        (499, ["cancelled"], "499"),
        (499, [], "499"),
        (500, ["error"], "500"),
        (503, [], "503"),
    ],
)
def test_a_visit_failed_if_the_server_or_a_stream_did_or_the_client_left(
    status: int, reasons: list[FinishReason], error: str | None
) -> None:
    failed = record(*map(request, reasons), visit=replace(VISIT, status=status))
    assert error_type(failed) == error
    assert visit_attributes(failed).get("error.type") == error


def test_a_request_waits_computes_its_prompt_and_answers() -> None:
    expected = [Phase("queue", 0.0, 0.75), Phase("prefill", 0.75, 1.5), Phase("decode", 1.5, 2.5)]
    assert phases(request()) == expected


def test_a_request_that_left_the_line_has_only_waited() -> None:
    left = request("cancelled", first=None, line=2.5, queue_seconds=0.0, prefill_seconds=0.0)
    assert phases(left) == [Phase("queue", 0.0, 2.5)]


def test_a_request_cancelled_in_its_prefill_has_no_decode() -> None:
    left = request("cancelled", first=None)
    assert phases(left) == [Phase("queue", 0.0, 0.75), Phase("prefill", 0.75, 2.5)]


def test_of_an_instance_that_died_only_the_line_is_known() -> None:
    lost = request("error", first=None, queue_seconds=0.0, prefill_seconds=0.0)
    assert phases(lost) == [Phase("queue", 0.0, 0.25)]


@given(
    first=st.none() | SECONDS,
    more=SECONDS,
    line=SECONDS,
    queue=SECONDS,
    prefill=st.just(0.0) | SECONDS,
)
def test_phases_follow_each_other_and_stay_inside_the_request(
    first: float | None, more: float, line: float, queue: float, prefill: float
) -> None:
    """Also where another attempt waited longer than the first took to its first token."""
    one = request(
        first=first,
        seconds=(first or 0.0) + more,
        line=line,
        queue_seconds=queue,
        prefill_seconds=prefill,
    )
    told = phases(one)
    assert told[0].from_seconds == 0.0
    assert all(phase.from_seconds <= phase.to_seconds <= one.seconds for phase in told)
    joints = itertools.pairwise(told)
    assert all(one.to_seconds == other.from_seconds for one, other in joints)


def test_an_answers_phases_say_whose_they_are() -> None:
    assert answer_attributes(3, request(attempt=1)) == {
        "kvell.choice": 3,
        "kvell.preemptions": 1,
        "kvell.retries": 1,
        "kvell.instance": "mixed-0",
    }
