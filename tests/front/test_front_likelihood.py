"""How likely tokens are, through the front: told once, in order, whatever attempts repeat."""

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.protocol.logprobs import PromptLogprobs, TokenLogprobs
from kvell.engine.protocol.messages import Finished, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.fleet.instance.death import InstanceDeath
from kvell.front.request_log import LogEntry, Mailbox, Output
from kvell.front.request_queue import RequestQueue
from kvell.vocabulary import RequestId
from tests.reports import facts

KILLED = InstanceDeath("it was killed", "killed")
NAME = RequestId("a")
PROMPT_TOKENS = 9
OUTPUT_TOKENS = 7
ONLY = "mixed-0"


def likely(position: int) -> TokenLogprobs:
    """Of token number ``position``, so that a wrong place is seen."""
    return TokenLogprobs(-float(position), 1 + position, ((position, -0.5),))


PROMPT = tuple(likely(100 + position) for position in range(PROMPT_TOKENS))
OUTPUT = tuple(likely(position) for position in range(OUTPUT_TOKENS))


def entry() -> LogEntry:
    sampling = SamplingParams(logprobs=1, prompt_logprobs=1)
    return LogEntry(RequestSpec(NAME, b"\1\0\0\0" * PROMPT_TOKENS, sampling), 0.0)


def scores(attempt: int, first: int, end: int) -> PromptLogprobs:
    """Of the prompt's tokens ``first`` … ``end - 1``."""
    return PromptLogprobs(NAME, attempt, first, PROMPT[first:end])


def tokens(attempt: int, first: int, end: int) -> Tokens:
    return Tokens(NAME, attempt, first, tuple(range(first, end)), logprobs=OUTPUT[first:end])


def taken(each: LogEntry) -> Output:
    return asyncio.run(asyncio.wait_for(each.mailbox.take(), 1))


def served() -> tuple[RequestQueue, LogEntry]:
    queue, request = RequestQueue(8), entry()
    queue.add(request)
    again(queue)
    return queue, request


def again(queue: RequestQueue) -> None:
    """Submit what waits to an instance that has just started."""
    queue.line(ONLY).open(facts(4))
    assert len(queue.due(0.0)) == 1


def test_scores_wait_for_the_first_token_and_come_with_it() -> None:
    queue, request = served()
    queue.on_scores(scores(0, 1, 4))
    queue.on_scores(scores(0, 4, 9))
    queue.tokens(tokens(0, 0, 2), 1.0)
    assert taken(request) == Output((0, 1), None, OUTPUT[:2], PROMPT[1:])
    queue.tokens(tokens(0, 2, 3), 1.0)
    assert taken(request) == Output((2,), None, OUTPUT[2:3])


def test_a_death_in_the_middle_of_a_prompt_tells_nothing_twice() -> None:
    queue, request = served()
    queue.on_scores(scores(0, 1, 5))
    queue.lost(ONLY, KILLED, 1.0)
    again(queue)
    queue.on_scores(scores(0, 5, 9))  # of the dead one
    queue.on_scores(scores(1, 1, 3))
    queue.on_scores(scores(1, 3, 8))
    queue.on_scores(scores(1, 8, 9))
    queue.tokens(tokens(1, 0, 1), 2.0)
    assert taken(request).prompt_logprobs == PROMPT[1:]
    assert request.scored_tokens == PROMPT_TOKENS - 1


def test_a_death_after_the_prompt_tells_it_no_more() -> None:
    queue, request = served()
    queue.on_scores(scores(0, 1, 9))
    queue.tokens(tokens(0, 0, 3), 1.0)
    assert taken(request).prompt_logprobs == PROMPT[1:]
    queue.lost(ONLY, KILLED, 1.0)
    again(queue)
    queue.on_scores(scores(1, 1, 9))
    queue.tokens(tokens(1, 3, 5), 2.0)
    assert taken(request) == Output((3, 4), None, OUTPUT[3:5])


def test_scores_of_unknown_requests_are_dropped() -> None:
    queue, request = served()
    queue.on_scores(PromptLogprobs(RequestId("unknown"), 0, 1, PROMPT[1:]))
    queue.tokens(tokens(0, 0, 1), 1.0)
    assert taken(request).prompt_logprobs == ()


def test_scores_of_a_request_that_fails_come_with_its_end() -> None:
    queue, request = served()
    queue.on_scores(scores(0, 1, 9))
    end = Finished(NAME, 0, "error")
    queue.on_finished(end, 1.0)
    assert taken(request) == Output((), end, (), PROMPT[1:])


def test_tokens_that_an_attempt_repeats_are_dropped_with_their_likelihoods() -> None:
    queue, request = served()
    queue.tokens(tokens(0, 0, 3), 1.0)
    queue.tokens(tokens(0, 1, 5), 1.0)
    queue.tokens(tokens(0, 2, 4), 1.0)
    assert taken(request) == Output((0, 1, 2, 3, 4), None, OUTPUT[:5])


cuts = st.lists(st.integers(0, 8), max_size=5)


def runs(marks: Sequence[int], first: int, end: int) -> list[tuple[int, int]]:
    """The range from ``first`` to ``end``, cut at the marks inside it."""
    inside = sorted({mark for mark in marks if first < mark < end})
    return list(zip([first, *inside], [*inside, end], strict=True)) if first < end else []


@given(st.lists(st.tuples(cuts, cuts, st.integers(1, 9), st.integers(0, 7)), max_size=2), cuts)
def test_whatever_dies_when_all_is_told_once_and_in_order(
    deaths: list[tuple[list[int], list[int], int, int]], marks: list[int]
) -> None:
    """Each attempt tells its scores, then tokens behind those known, and dies somewhere."""
    queue, request = served()
    told: list[Output] = []
    plans = [*deaths, (marks, marks, PROMPT_TOKENS, OUTPUT_TOKENS)]
    for attempt, (score_marks, token_marks, scored, emitted) in enumerate(plans):
        if attempt:
            queue.lost(ONLY, KILLED, 1.0)
            again(queue)
        for first, end in runs(score_marks, 1, scored):
            queue.on_scores(scores(attempt, first, end))
        known = request.emitted_tokens if scored == PROMPT_TOKENS else emitted
        for first, end in runs(token_marks, known, emitted):
            queue.tokens(tokens(attempt, first, end), 1.0)
            told.append(taken(request))
    assert sum((output.token_ids for output in told), ()) == tuple(range(request.emitted_tokens))
    assert request.emitted_tokens == OUTPUT_TOKENS or not told
    likely = tuple(one for output in told for one in output.logprobs)
    assert likely == OUTPUT[: request.emitted_tokens]
    prompt = [one for output in told for one in output.prompt_logprobs]
    assert prompt == (list(PROMPT[1:]) if told else [])


def test_a_mailbox_merges_likelihoods_like_tokens() -> None:
    async def scenario() -> list[Output]:
        mailbox = Mailbox()
        mailbox.put_prompt(PROMPT[1:3])
        reading = asyncio.ensure_future(mailbox.take())
        await asyncio.sleep(0)
        assert not reading.done(), "scores alone wake nobody"
        mailbox.put_prompt(PROMPT[3:])
        mailbox.put((0,), OUTPUT[:1])
        mailbox.put((1, 2), OUTPUT[1:3])
        first = await reading
        mailbox.put((3,), OUTPUT[3:4])
        return [first, await mailbox.take()]

    assert asyncio.run(scenario()) == [
        Output((0, 1, 2), None, OUTPUT[:3], PROMPT[1:]),
        Output((3,), None, OUTPUT[3:4]),
    ]
