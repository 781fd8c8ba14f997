"""Prompts whose tokens are scored: rows of logits stay within bounds, and all is told once."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvell.engine.planning.whole_prompts import without_chunks
from kvell.engine.protocol.logprobs import PromptLogprobs, TokenLogprobs
from kvell.engine.protocol.messages import Finished, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.engine.requests.admissible import sampling_problem
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import NO_TOKEN, StepPlan, StepResult
from kvell.vocabulary import RequestId
from tests.engine.conftest import make_layout
from tests.engine.traffic import Traffic, limits

PROMPT = list(range(1, 31))
PLAIN = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=0)


def likely(position: int) -> TokenLogprobs:
    return TokenLogprobs(-float(position), 1)


def submit(
    traffic: Traffic, name: str, sampling: SamplingParams, prompt: Sequence[int] = PROMPT
) -> None:
    ids = np.asarray(prompt, "<i4").tobytes()
    traffic.tell(Submit(RequestSpec(RequestId(name), ids, sampling)))


def result_of(plan: StepPlan) -> StepResult:
    """A result in which token 7 is drawn everywhere, and positions tell themselves."""
    scored = {
        work.handle: tuple(
            likely(position)
            for position in range(work.start + 1, work.start + work.count + 1)
            if position < work.spec.prompt_tokens
        )
        for work in plan.work
        if work.scores is not None
    }
    return StepResult(plan.step, (7,) * sum(work.samples for work in plan.work), scored=scored)


def run(traffic: Traffic) -> None:
    for _ in range(400):
        if not traffic.core.has_work:
            return
        traffic.commit(result_of(traffic.plan()))
    raise AssertionError("requests are left over")


def told(traffic: Traffic, name: str) -> list[TokenLogprobs]:
    events = [e for e in traffic.events if isinstance(e, PromptLogprobs) and e.request_id == name]
    found: list[TokenLogprobs] = []
    for event in events:
        assert event.first_index == 1 + len(found)
        found += event.logprobs
    return found


ALL = [likely(position) for position in range(1, len(PROMPT))]


@pytest.mark.parametrize("seats", [1, 3, 8])
def test_scored_prompts_come_in_chunks_even_where_others_are_whole(seats: int) -> None:
    layout = make_layout((0, 9), 60)
    traffic = Traffic(layout, without_chunks(limits(batched=40, seats=seats), layout))
    for index in range(2):
        submit(traffic, f"plain{index}", PLAIN, PROMPT[index:])
        submit(traffic, f"scored{index}", SCORED)
    run(traffic)
    counts: dict[str, list[int]] = {}
    for work in (work for plan in traffic.plans for work in plan.work):
        counts.setdefault(work.request_id, []).append(work.count)
    for index in range(2):
        assert told(traffic, f"scored{index}") == ALL
        assert max(counts[f"scored{index}"]) <= seats
        assert max(counts[f"plain{index}"]) == len(PROMPT) - index


@pytest.mark.parametrize("seats", [1, 2, 3, 8])
def test_a_step_has_no_more_rows_than_seats(seats: int) -> None:
    traffic = Traffic(make_layout((0, 9), 60), limits(batched=16, seats=seats))
    for index in range(3):
        submit(traffic, f"plain{index}", PLAIN, PROMPT[index:])
        submit(traffic, f"scored{index}", SCORED)
    run(traffic)
    assert max(plan.num_logits for plan in traffic.plans) <= seats
    for index in range(3):
        assert told(traffic, f"scored{index}") == ALL
        assert told(traffic, f"plain{index}") == []
        assert len(traffic.tokens(f"scored{index}")) == 6


def test_a_scored_prompt_uses_no_cache_and_leaves_none() -> None:
    traffic = Traffic(make_layout((0, 9), 60), limits(batched=40, seats=40))
    for name, sampling in (("a", SCORED), ("b", PLAIN), ("c", SCORED), ("d", PLAIN)):
        submit(traffic, name, sampling)
        run(traffic)
    cached = [traffic.finished(name).cached_tokens for name in "abcd"]
    assert cached == [0, 0, 0, len(PROMPT) - 1]
    assert told(traffic, "a") == told(traffic, "c") == ALL


def test_positions_told_before_a_preemption_are_not_told_again() -> None:
    traffic = Traffic(make_layout((0, 9), 16), limits(batched=16, seats=40))
    long = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, prompt_logprobs=0)
    for name in "abcd":
        submit(traffic, name, long)
    run(traffic)
    assert traffic.rung("preempt") > 0
    for name in "abcd":
        assert told(traffic, name) == ALL
        assert len(traffic.tokens(name)) == 24


def test_work_that_looks_back_has_its_past_and_plain_work_has_none() -> None:
    traffic = Traffic(make_layout((0, 9), 60), limits(batched=64, seats=40))
    wishing = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, presence_penalty=1)
    for name, sampling in (("plain", PLAIN), ("scored", SCORED), ("wishing", wishing)):
        submit(traffic, name, sampling, PROMPT[:10])
    run(traffic)
    for plan in traffic.plans:
        for work in plan.work:
            if work.request_id == "plain":
                assert work.past is None
                continue
            assert work.past is not None
            known = [*PROMPT[:10], *[7] * 6]
            assert work.past.tolist() == known[: max(10, work.start + work.count)]
            is_scored = work.request_id == "scored" and work.start < 9
            assert work.scores == (0 if is_scored else None)


def test_no_token_ends_a_request_with_an_error_and_without_a_token() -> None:
    traffic = Traffic(make_layout((0, 9), 60), limits())
    grammar = StructuredOutputs(regex="a*")
    submit(traffic, "a", SamplingParams(temperature=0, structured_outputs=grammar))
    submit(traffic, "b", PLAIN, PROMPT[:4])
    traffic.answer(traffic.plan(), 7)
    while len(traffic.tokens("a")) < 2:
        traffic.commit(result_of(traffic.plan()))
    plan = traffic.plan()
    drawn = [NO_TOKEN if work.request_id == "a" else 7 for work in plan.work]
    events = traffic.answer(plan, *drawn)
    [end] = [event for event in events if isinstance(event, Finished)]
    assert (end.request_id, end.reason, end.output_tokens) == ("a", "error", 2)
    assert "grammar" in end.message
    assert [e.request_id for e in events if isinstance(e, Tokens)] == ["b"]
    run(traffic)
    assert traffic.tokens("a") == [7, 7]
    assert len(traffic.tokens("b")) == 6


def with_budget(seats: int) -> Limits:
    return Limits(max_num_batched_tokens=32, max_num_seqs=seats, vocab_size=50, observing_tokens=8)


def test_what_a_model_cannot_serve_is_refused() -> None:
    bias = SamplingParams(logit_bias={49: 1.0, 50: 1.0})
    for sampling, has_images, name in ((bias, False, "logit_bias"), (SCORED, True, "prompt_")):
        problem = sampling_problem(sampling, limits(), has_images)
        assert problem is not None
        assert problem.field.startswith(name)
    assert sampling_problem(SamplingParams(logit_bias={49: 1.0}), limits(), False) is None
    assert sampling_problem(SCORED, limits(), False) is None
    assert sampling_problem(PLAIN, with_budget(8), False) is None
    assert sampling_problem(SCORED, with_budget(9), False) is None
    problem = sampling_problem(SCORED, with_budget(8), False)
    assert problem is not None
    assert "use --max-num-seqs 9" in str(problem)
