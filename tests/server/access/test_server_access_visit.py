"""A visit's tokens: reserved at its start, settled to what was used, however it ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.clock import VirtualClock
from kvell.engine.protocol.messages import Finished
from kvell.errors import ChangeSomething
from kvell.front.request_log import EndedRequest
from kvell.server.access.accounts import Account, ApiKey, RateExceeded
from kvell.server.access.visit import RequestContext, Sequences
from kvell.server.text.text_stream import TextDelta, Usage
from kvell.vocabulary import FinishReason, RequestId

LIMIT = 1000


def visit(
    account: Account | None, clock: VirtualClock | None = None, tenant: str = "t"
) -> RequestContext:
    return RequestContext("POST", "/v1/completions", tenant, account, clock or VirtualClock())


def left(account: Account) -> int:
    return int(account.headers(0.0)["x-ratelimit-remaining-tokens"])


def pieces(counts: list[int], cached: int = 0) -> list[TextDelta]:
    usages = [*[Usage()] * (len(counts) - 1), Usage(10, sum(counts), cached)]
    each = zip(counts, usages, strict=True)
    return [TextDelta("x", token_ids=(7,) * count, usage=usage) for count, usage in each]


def count(one: RequestContext, deltas: list[TextDelta]) -> None:
    for delta in deltas:
        one.count(delta)


@given(
    prompt=st.integers(1, 200),
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=10),
    spare=st.integers(0, 300),
    status=st.sampled_from([200, 499, 500]),
)
def test_in_the_end_exactly_what_was_used_is_missing(
    prompt: int, counts: list[int], spare: int, status: int
) -> None:
    account = Account(ApiKey("t", b"", None, LIMIT), 0.0)
    one = visit(account)
    one.begin("id", "m", prompt, sum(counts) + spare)
    assert left(account) == LIMIT - prompt - sum(counts) - spare
    count(one, pieces(counts))
    ended = one.end(status)
    made = sum(counts)
    used = prompt + made if made or status != 500 else 0
    assert left(account) == LIMIT - used
    assert ended.prompt_tokens + ended.output_tokens == used


def test_a_client_that_leaves_pays_for_what_was_made() -> None:
    account = Account(ApiKey("t", b"", None, LIMIT), 0.0)
    one = visit(account)
    one.begin("id", "m", 10, 500)
    count(one, pieces([3, 4, 5, 6])[:2])
    ended = one.end(499)
    assert (ended.prompt_tokens, ended.output_tokens) == (10, 7)
    assert left(account) == LIMIT - 17


def test_a_client_that_leaves_before_any_output_pays_for_its_prompt() -> None:
    account = Account(ApiKey("t", b"", None, LIMIT), 0.0)
    one = visit(account)
    one.begin("id", "m", 10, 500)
    one.end(499)
    assert left(account) == LIMIT - 10


@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_what_was_refused_costs_no_tokens(status: int) -> None:
    account = Account(ApiKey("t", b"", None, LIMIT), 0.0)
    one = visit(account)
    one.begin("id", "m", 10, 500)
    assert one.end(status).prompt_tokens == 0
    assert left(account) == LIMIT


def ended(reason: FinishReason, tokens: int = 0, prefill_seconds: float = 0.0) -> EndedRequest:
    finished = Finished(RequestId("r"), 0, reason, prefill_seconds=prefill_seconds)
    return EndedRequest(finished, 1.0, 0.0, tokens, None)


@pytest.mark.parametrize("status", [408, 429, 499, 500, 503])
@pytest.mark.parametrize("tokens", [0, 7])
def test_what_instances_computed_is_charged_however_the_request_ends(
    status: int, tokens: int
) -> None:
    account = Account(ApiKey("t", b"", None, LIMIT), 0.0)
    one = visit(account)
    one.begin("id", "m", 30, 500, Sequences(2))
    begun, waiting = one.sequence(0, 0, 10), one.sequence(1, 1, 20)
    begun.on_admitted()
    waiting.on_admitted()
    begun.on_ended(ended("cancelled", tokens, prefill_seconds=0.1))
    waiting.on_ended(ended("cancelled"))
    told = one.end(status)
    assert (told.prompt_tokens, told.output_tokens) == (10, tokens)
    assert left(account) == LIMIT - 10 - tokens


@pytest.mark.parametrize(("computed", "used"), [(0.0, 0), (0.1, 15)])
def test_what_a_cancelled_request_computed_is_settled_once_its_instance_tells(
    computed: float, used: int
) -> None:
    account = Account(ApiKey("t", b"", None, LIMIT), 0.0)
    one = visit(account)
    one.begin("id", "m", 10, 500)
    use = one.sequence(0, 0, 10)
    use.on_admitted()
    one.end(499)
    assert left(account) == LIMIT - 510
    use.on_ended(ended("cancelled", 5 if computed else 0, computed))
    assert left(account) == LIMIT - used


def test_a_prompt_is_charged_once_for_all_its_answers_and_beams_for_all_their_tokens() -> None:
    account = Account(ApiKey("t", b"", None, LIMIT), 0.0)
    one = visit(account)
    one.begin("id", "m", 10, 500, Sequences(2))
    for index in range(2):
        use = one.sequence(index, 0, 10)
        for _ in range(3):
            use.on_admitted()
        for _ in range(3):
            use.on_ended(ended("length", 1))
    one.end(408)
    assert left(account) == LIMIT - 10 - 6


def test_tokens_behind_a_stop_string_are_not_charged() -> None:
    account = Account(ApiKey("t", b"", None, LIMIT), 0.0)
    one = visit(account)
    one.begin("id", "m", 10, 500)
    use = one.sequence(0, 0, 10)
    use.on_admitted()
    use.on_ended(ended("stop", 9))
    one.count(TextDelta("x", "stop", token_ids=(7,) * 4))
    assert one.end(200).output_tokens == 4
    assert left(account) == LIMIT - 14


def test_a_visit_that_begins_no_answer_costs_nothing() -> None:
    account = Account(ApiKey("t", b"", None, LIMIT), 0.0)
    ended = visit(account).end(200)
    assert (ended.answer_id, ended.prompt_tokens, ended.output_tokens) == ("", 0, 0)
    assert left(account) == LIMIT


def test_a_reservation_that_is_refused_gives_nothing_back() -> None:
    account = Account(ApiKey("t", b"", None, LIMIT), 0.0)
    first, second, third = visit(account), visit(account), visit(account)
    first.begin("a", "m", 100, 800)
    with pytest.raises(RateExceeded):
        second.begin("b", "m", 100, 100)
    with pytest.raises(ChangeSomething):
        third.begin("c", "m", 100, 1000)
    second.end(429)
    third.end(400)
    assert left(account) == LIMIT - 900


def test_it_ends_with_all_there_is_to_tell() -> None:
    clock = VirtualClock(5.0)
    one = visit(None, clock)
    one.begin("cmpl-1", "model", 10, 500)
    count(one, pieces([1, 2], cached=8))
    clock.advance(2.5)
    ended = one.end(200)
    assert (ended.method, ended.path, ended.tenant) == ("POST", "/v1/completions", "t")
    assert (ended.status, ended.seconds) == (200, 2.5)
    assert (ended.answer_id, ended.model) == ("cmpl-1", "model")
    assert (ended.prompt_tokens, ended.output_tokens, ended.cached_tokens) == (10, 3, 8)


def test_salts_are_the_tenants_own() -> None:
    assert visit(None, tenant="").salt(None) == ""
    assert visit(None, tenant="").salt("s") == "s"
    assert visit(None, tenant="a").salt(None) == "1:a"
    assert visit(None, tenant="a").salt("s") == "1:as"
