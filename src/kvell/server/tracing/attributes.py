"""What a span says: numbers and names of a record, never a prompt, an output or a key.

Names are those of OpenTelemetry's conventions for HTTP and for generative AI, vLLM's for
latencies and ``n``, and Kvell's own.  What the front was not told is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvell.front.request_log import EndedRequest
from kvell.server.access.visit import CLIENT_GONE_STATUS
from kvell.server.tracing.traced_visit import VisitRecord

Value = str | int | float | Sequence[str]
SERVER_ERROR = 500
ANSWERED = ("stop", "length")
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "QUERY")
OTHER_METHOD = "_OTHER"
"""Clients may send any word; a trace's reader groups by it."""
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


@dataclass(frozen=True)
class Phase:
    """A part of a request's time, in seconds since it arrived."""

    name: str
    from_seconds: float
    to_seconds: float


def span_name(record: VisitRecord) -> str:
    """The method and the route, of which there are few."""
    method = record.visit.method if record.visit.method in METHODS else "HTTP"
    return f"{method} {record.route}".rstrip()


def visit_attributes(record: VisitRecord) -> dict[str, Value]:
    """What the span of a whole visit says."""
    method = record.visit.method
    told: dict[str, Value] = {
        "http.request.method": method if method in METHODS else OTHER_METHOD,
        "http.response.status_code": record.visit.status,
    }
    if record.route:
        told["http.route"] = record.route
    if operation := OPERATIONS.get(record.route):
        told |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "kvell"}
    told |= _asked(record) | _answered(record) | _served(list(record.requests.values()))
    if (error := error_type(record)) is not None:
        told["error.type"] = error
    return told


def error_type(record: VisitRecord) -> str | None:
    """Why a visit counts as failed; None if it does not.

    As HTTP's conventions have it, other statuses of 400 and more are the client's mistake.  An
    answer that failed behind a status of 200 was streamed.
    """
    status = record.visit.status
    if status >= SERVER_ERROR or status == CLIENT_GONE_STATUS:
        return str(status)
    reasons = {one.finished.reason for one in record.requests.values()}
    if status >= 400 or reasons <= {*ANSWERED}:
        return None
    return next(one for one in ("error", "refused", "cancelled") if one in reasons)


def answer_attributes(index: int, request: EndedRequest) -> dict[str, Value]:
    """What the spans of one answer's phases say."""
    return {"kvell.choice": index} | _where([request])


def phases(request: EndedRequest) -> list[Phase]:
    """The parts of a request's time that are known.

    Waiting is told by the front and the instance, the first token's time by the front.  An instance
    that died told nothing; then nobody knows whether it waited there.
    """
    first, end = request.first_token_seconds, request.seconds
    queued = min(_queue_seconds(request), end if first is None else first)
    told = [Phase("queue", 0.0, queued)]
    if first is not None:
        return [*told, Phase("prefill", queued, first), Phase("decode", first, end)]
    if request.finished.prefill_seconds > 0:
        return [*told, Phase("prefill", queued, end)]
    return told


def _queue_seconds(request: EndedRequest) -> float:
    return request.line_seconds + request.finished.queue_seconds


def _asked(record: VisitRecord) -> dict[str, Value]:
    if record.asked is None:
        return {}
    model, sampling = record.asked
    told: dict[str, Value] = {
        "gen_ai.request.model": model,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.n": sampling.n,
    }
    if sampling.max_tokens is not None:
        told["gen_ai.request.max_tokens"] = sampling.max_tokens
    return told


def _answered(record: VisitRecord) -> dict[str, Value]:
    visit = record.visit
    if not visit.answer_id:
        return {}
    return {
        "gen_ai.response.id": visit.answer_id,
        "gen_ai.response.model": visit.model,
        "gen_ai.usage.input_tokens": visit.prompt_tokens,
        "gen_ai.usage.output_tokens": visit.output_tokens,
        "gen_ai.latency.e2e": visit.seconds,
        "kvell.cached_tokens": visit.cached_tokens,
    }


def _served(requests: Sequence[EndedRequest]) -> dict[str, Value]:
    """Of several answers: the longest wait, and the token that came first."""
    if not requests:
        return {}
    told: dict[str, Value] = {
        "gen_ai.response.finish_reasons": [one.finished.reason for one in requests],
        "gen_ai.latency.time_in_queue": max(_queue_seconds(one) for one in requests),
    }
    first = [s for one in requests if (s := one.first_token_seconds) is not None]
    if first:
        told["gen_ai.latency.time_to_first_token"] = min(first)
    return told | _where(requests)


def _where(requests: Sequence[EndedRequest]) -> dict[str, Value]:
    told: dict[str, Value] = {
        "kvell.preemptions": sum(one.finished.preemptions for one in requests),
        "kvell.retries": sum(one.finished.attempt for one in requests),
    }
    if instances := sorted({one.instance for one in requests if one.instance}):
        told["kvell.instance"] = ",".join(instances)
    return told
