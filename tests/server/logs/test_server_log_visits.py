"""What is said of visits: never a key, never a text, and never so much that it fills a disk."""

import logging

import pytest

from kvell.clock import VirtualClock
from kvell.server.access.traced_visit import EndedVisit
from kvell.server.logs.lines import FIELDS
from kvell.server.logs.visits import REFUSALS_PER_MINUTE, VisitLines

ENDED = EndedVisit("POST", "/v1/completions", "team", 200, 0.12345678, "cmpl-1", "m", 10, 20, 8)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "kvell")
    return caplog


def fields(told: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [getattr(record, FIELDS) for record in told.records]


def test_requests_are_told_only_if_that_is_asked_for(told: pytest.LogCaptureFixture) -> None:
    VisitLines(tells_requests=False).on_ended(ENDED)
    assert told.records == []
    VisitLines(tells_requests=True).on_ended(ENDED)
    assert [record.getMessage() for record in told.records] == ["request_ended"]
    assert fields(told) == [
        {
            "method": "POST",
            "path": "/v1/completions",
            "tenant": "team",
            "status": 200,
            "seconds": 0.123457,
            "id": "cmpl-1",
            "model": "m",
            "prompt_tokens": 10,
            "output_tokens": 20,
            "cached_tokens": 8,
        }
    ]


def test_all_requests_are_counted_whether_or_not_they_get_a_line() -> None:
    counted: list[tuple[str, int]] = []
    lines = VisitLines(tells_requests=False, count=lambda *what: counted.append(what))
    lines.on_ended(ENDED)
    for _ in range(2 * REFUSALS_PER_MINUTE):
        lines.on_refused("GET", "/v1/models", "10.0.0.1", 401, "")
    assert counted[0] == ("/v1/completions", 200)
    assert counted[1:] == [("/v1/models", 401)] * (2 * REFUSALS_PER_MINUTE)


def test_a_request_without_an_answer_has_no_tokens(told: pytest.LogCaptureFixture) -> None:
    VisitLines(tells_requests=True).on_ended(EndedVisit("GET", "/health", "", 503, 0.5))
    assert fields(told) == [{"method": "GET", "path": "/health", "status": 503, "seconds": 0.5}]


ROUTINE = [
    *(("GET", path) for path in ("/", "/livez", "/readyz", "/health", "/ping", "/metrics")),
    *(
        ("GET", path)
        for path in ("/version", "/load", "/cluster", "/debug/pages", "/debug/pages/m/3")
    ),
    *(("POST", "/ping"), ("HEAD", "/health")),
]
OTHERS = [
    *(("POST", path) for path in ("/cluster/scale", "/cluster/drain", "/reset_prefix_cache")),
    *(("GET", path) for path in ("/v1/models", "/debug", "/metrics2", "/api/tags", "/docs")),
    *(("POST", "/v1/completions"), ("POST", "/debug/pages"), ("DELETE", "/cluster")),
]


@pytest.mark.parametrize("status", [200, 302, 400, 404, 499, 503])
@pytest.mark.parametrize(("method", "path"), [*ROUTINE, *OTHERS])
def test_operators_reads_are_logged_only_if_they_fail(
    told: pytest.LogCaptureFixture, method: str, path: str, status: int
) -> None:
    counted: list[tuple[str, int]] = []
    lines = VisitLines(tells_requests=True, count=lambda *what: counted.append(what))
    lines.on_ended(EndedVisit(method, path, "", status, 0.5))
    assert len(told.records) == (status >= 400 or (method, path) in OTHERS)
    assert counted == [(path, status)], "metrics count all"


def test_refused_keys_are_always_told(told: pytest.LogCaptureFixture) -> None:
    lines = VisitLines(tells_requests=False)
    lines.on_refused("POST", "/v1/x" + "y" * 500, "10.0.0.1", 401, "")
    lines.on_refused("GET", "/cluster", "10.0.0.1", 403, "team")
    one, other = fields(told)
    assert (one["status"], one["client"], one["untold"]) == (401, "10.0.0.1", 0)
    assert len(str(one["path"])) == 100
    assert "tenant" not in one
    assert (other["status"], other["tenant"]) == (403, "team")
    assert {record.levelno for record in told.records} == {logging.WARNING}


def test_a_refused_page_is_told_with_the_header_that_shows_it(
    told: pytest.LogCaptureFixture,
) -> None:
    VisitLines(tells_requests=False).on_refused("POST", "/x", "::1", 403, "", "origin")
    assert told.records[0].getMessage() == "page_refused"
    assert fields(told)[0]["header"] == "origin"


def test_who_tries_many_keys_does_not_fill_the_log(told: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    lines = VisitLines(tells_requests=False, clock=clock)
    for _ in range(1000):
        lines.on_refused("POST", "/v1/x", "10.0.0.1", 401, "")
    assert len(told.records) == REFUSALS_PER_MINUTE
    clock.advance(1.0)
    lines.on_refused("POST", "/v1/x", "10.0.0.1", 401, "")
    clock.advance(1.0)
    lines.on_refused("POST", "/v1/x", "10.0.0.1", 401, "")
    *_, after, last = fields(told)
    assert (after["untold"], last["untold"]) == (1000 - REFUSALS_PER_MINUTE, 0)
