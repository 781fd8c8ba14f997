"""Requests for a vector, and prompts whose tokens are scored: planned like prompts."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvell.engine.core.journal import replay
from kvell.engine.planning.admission import embedded_images
from kvell.engine.planning.scheduler import Scheduler
from kvell.engine.planning.whole_prompts import without_chunks
from kvell.engine.protocol.logprobs import PromptLogprobs, TokenLogprobs
from kvell.engine.protocol.messages import Event, Finished, Submit, Tokens
from kvell.engine.protocol.pooling import Pooling
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.engine.requests.admissible import pooling_problem, sampling_problem, served_pooling
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import NO_TOKEN, StepPlan, StepResult
from kvell.errors import ChangeSomething
from kvell.memory import GroupKind
from kvell.vocabulary import RequestId
from tests.engine.conftest import make_layout, make_submit
from tests.engine.planning.ahead import Ahead
from tests.engine.traffic import Traffic, limits
from tests.engine.virtual_model import expected_output, expected_vector
from tests.models.pictures import PATCHES, ServedPictures, pictured, text
from tests.pages.pools import group, images, pool_of

PROMPT = list(range(1, 31))


def outputs_of(scheduler: Scheduler) -> tuple[int, int]:
    return scheduler.admission.outputs[""]


def pool(traffic: Traffic, name: str, prompt: list[int], salt: str = "") -> None:
    traffic.prompts[name] = prompt
    traffic.tell(make_submit(name, prompt, salt=salt, pooling="last"))


def check(traffic: Traffic, name: str) -> Finished:
    """The request's end, which has its vector, behind no tokens."""
    end = traffic.finished(name)
    prompt = traffic.prompts[name]
    assert (end.reason, end.output_tokens, traffic.tokens(name)) == ("stop", 0, [])
    assert end.prompt_tokens == len(prompt)
    assert end.embedding == expected_vector(prompt)
    return end


def test_it_ends_with_the_step_that_computes_its_last_token() -> None:
    traffic = Traffic(make_layout((0, 9), 60), limits(batched=64))
    pool(traffic, "a", PROMPT)
    assert traffic.step() == [("a", 0, 30)]
    check(traffic, "a")
    assert not traffic.core.has_work
    assert sum(traffic.core.memory.snapshot().used) == 0


def test_only_its_last_chunk_gives_a_row() -> None:
    traffic = Traffic(make_layout((0, 9), 60), limits(batched=8))
    pool(traffic, "a", PROMPT)
    traffic.run()
    works = [plan.work[0] for plan in traffic.plans]
    assert [(work.start, work.count) for work in works] == [(0, 8), (8, 8), (16, 8), (24, 6)]
    assert [work.num_logits for work in works] == [0, 0, 0, 1]
    assert [work.pools for work in works] == [False, False, False, True]
    assert [plan.pools for plan in traffic.plans] == [False, False, False, True]
    check(traffic, "a")


@pytest.mark.parametrize("batched", [8, 64])
def test_prompts_hit_what_it_computed_and_it_hits_theirs(batched: int) -> None:
    traffic = Traffic(make_layout((0, 9), 60), limits(batched=batched))
    pool(traffic, "a", PROMPT)
    traffic.run()
    traffic.submit("b", [*PROMPT, 31, 32], 4)
    traffic.run()
    pool(traffic, "c", PROMPT)
    pool(traffic, "d", PROMPT, salt="other")
    traffic.run()
    cached = [traffic.finished(name).cached_tokens for name in "abcd"]
    assert cached == [0, len(PROMPT), len(PROMPT) - 1, 0]
    for name in "acd":
        check(traffic, name)
    assert traffic.tokens("b") == expected_output([*PROMPT, 31, 32], 4)


def test_it_waits_for_a_prefix_that_is_just_computed() -> None:
    traffic = Traffic(make_layout((0, 9), 60), limits(batched=16))
    pool(traffic, "a", PROMPT)
    pool(traffic, "b", PROMPT)
    traffic.run()
    assert traffic.rung("wait_for_prefix") > 0
    assert check(traffic, "b").cached_tokens == len(PROMPT) - 1
    check(traffic, "a")


def test_beside_answers_that_stay_as_they_are() -> None:
    traffic = Traffic(make_layout((0, 9), 60), limits(batched=16))
    for index in range(4):
        traffic.submit(f"text{index}", PROMPT[index:], 7)
        pool(traffic, f"vector{index}", PROMPT[::-1][index:])
    traffic.run()
    for index in range(4):
        assert len(traffic.tokens(f"text{index}")) == 7
        check(traffic, f"vector{index}")


@pytest.mark.parametrize("batched", [4, 5])
def test_one_that_is_preempted_begins_again(batched: int) -> None:
    """Answers that were admitted before grow while its prompt is computed in small chunks."""
    traffic = Traffic(make_layout((0, 9), 22), limits(batched=batched))
    for index in range(3):
        traffic.submit(f"text{index}", PROMPT[: 4 + index], 40)
    for _ in range(6):
        traffic.step()
    pool(traffic, "vector", PROMPT[::-1])
    traffic.run()
    assert check(traffic, "vector").preemptions > 0
    assert [len(traffic.tokens(f"text{index}")) for index in range(3)] == [40] * 3


@pytest.mark.parametrize("computed_steps", [0, 1])
def test_a_cancelled_one_has_no_vector_and_no_pages(computed_steps: int) -> None:
    traffic = Traffic(make_layout((0, 9), 60), limits(batched=8))
    pool(traffic, "a", PROMPT)
    for _ in range(computed_steps):
        traffic.step()
    traffic.cancel("a")
    traffic.run()
    end = traffic.finished("a")
    assert (end.reason, end.embedding) == ("cancelled", b"")
    assert sum(traffic.core.memory.snapshot().used) == 0


def test_one_cancelled_while_its_last_step_runs_has_none_either() -> None:
    traffic = Traffic(make_layout((0, 9), 60), limits(batched=64))
    pool(traffic, "a", PROMPT)
    plan = traffic.plan()
    assert traffic.cancel("a") == []
    traffic.finish_step(plan)
    end = traffic.finished("a")
    assert (end.reason, end.embedding) == ("cancelled", b"")


def test_a_step_ahead_plans_nothing_behind_its_last_token() -> None:
    ahead = Ahead(make_layout((0, 9), 40))
    ahead.tell(make_submit("a", PROMPT, pooling="last"))
    ahead.submit("b", PROMPT[::-1], 5)
    ahead.run()
    own = [
        (work.start, work.count)
        for plan in ahead.plans
        for work in plan.work
        if work.request_id == "a"
    ]
    assert own == [(0, 16), (16, 14)]
    assert ended(ahead.events, "a").embedding == expected_vector(PROMPT)
    assert ahead.tokens("b") == expected_output(PROMPT[::-1], 5)
    assert replay(ahead.journal.entries, ahead.fresh()) == ahead.plans


def ended(events: list[Event], name: str) -> Finished:
    [end] = [event for event in events if isinstance(event, Finished) and event.request_id == name]
    assert not [e for e in events if isinstance(e, Tokens) and e.request_id == name]
    return end


@pytest.mark.parametrize("length", [63, 64])
def test_a_prompt_may_fill_the_longest_request(length: int) -> None:
    prompt = [(7 * i) % 50 for i in range(length)]
    traffic = Traffic(make_layout((0, 9), 20), limits(max_len=64))
    pool(traffic, "a", prompt)
    traffic.run()
    check(traffic, "a")


def test_it_says_nothing_of_how_long_answers_are() -> None:
    traffic = Traffic(make_layout((0, 9), 60), limits(batched=64))
    traffic.submit("text", PROMPT, 20)
    traffic.run()
    expected = outputs_of(traffic.core.scheduler)
    pool(traffic, "vector", PROMPT)
    traffic.run()
    assert outputs_of(traffic.core.scheduler) == expected == (1, 20)


def test_its_sampling_does_not_matter() -> None:
    traffic = Traffic(make_layout((0, 9), 60), limits(batched=8))
    wishing = SamplingParams(max_tokens=40, presence_penalty=1, prompt_logprobs=1, logprobs=1)
    ids = np.asarray(PROMPT, "<i4").tobytes()
    traffic.prompts["a"] = PROMPT
    traffic.tell(Submit(RequestSpec(RequestId("a"), ids, wishing, pooling="last")))
    traffic.run()
    check(traffic, "a")
    assert all(work.past is None for plan in traffic.plans for work in plan.work)


@pytest.mark.parametrize(
    ("prompt", "has_images", "field", "remedy"),
    [
        ([], False, "prompt", "at least one"),
        ([1] * 65, False, "prompt", "shorten it to 64 tokens or raise --max-model-len"),
        ([50], False, "prompt", "use ids from 0 to 49"),
        ([1], True, "images", "leave them out"),
    ],
)
def test_what_has_no_vector_is_refused_by_name(
    prompt: list[int], has_images: bool, field: str, remedy: str
) -> None:
    problem = pooling_problem(np.asarray(prompt, np.int32), limits(), has_images=has_images)
    assert problem is not None and problem.field == field and remedy in problem.remedy
    assert pooling_problem(np.asarray([1] * 64, np.int32), limits(), has_images=False) is None


def test_the_engine_refuses_what_the_front_let_pass() -> None:
    traffic = Traffic(make_layout((0, 9), 60), limits())
    pool(traffic, "long", [1] * 65)
    with_image = Submit(
        RequestSpec(
            RequestId("image"),
            np.asarray([1, -2, 3], "<i4").tobytes(),
            SamplingParams(),
            images=((1, 1, 1),),
            pooling="last",
        )
    )
    traffic.tell(with_image)
    ends = [traffic.finished(name) for name in ("long", "image")]
    assert [end.reason for end in ends] == ["refused"] * 2
    assert [end.field for end in ends] == ["prompt", "images"]


@pytest.mark.parametrize("pooling", ["mean", "cls", ""])
def test_other_poolings_are_refused_by_name(pooling: str) -> None:
    with pytest.raises(ChangeSomething) as caught:
        served_pooling(pooling)
    assert (caught.value.field, caught.value.remedy) == ("pooling", "use last")


def test_output_of_an_earlier_attempt_cannot_follow_a_pooled_prompt() -> None:
    asked: Pooling = "last"
    with pytest.raises(ChangeSomething, match="output"):
        Submit(
            RequestSpec(RequestId("a"), b"\1\0\0\0", SamplingParams(), pooling=asked),
            output=b"\1\0\0\0",
        )


def test_answers_alone_are_planned_as_before() -> None:
    traffic = Traffic(make_layout((0, 9), 60), Limits(max_num_batched_tokens=16, vocab_size=50))
    traffic.submit("a", PROMPT, 5)
    traffic.run()
    assert not any(plan.pools for plan in traffic.plans)
    assert not any(work.pools for plan in traffic.plans for work in plan.work)


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


GROUPS = pool_of(40, group(4, 2), images(GroupKind.VISION, 4, 2)).groups
IMAGES = ((3, 10, 10), (13, 4, 4), (20, 9, 9))


@pytest.mark.parametrize(("pages", "count"), [(0, 0), (3, 1), (4, 2), (7, 3)])
def test_images_count_while_all_their_pages_are_held(pages: int, count: int) -> None:
    """Images of three, one and three pages; pages of the text do not count."""
    rows = [(0, 0, p, p) for p in range(9)] + [(0, 1, p, p) for p in range(pages)]
    assert embedded_images(GROUPS, np.asarray(rows, np.int32), IMAGES) == count


def test_no_page_of_embeddings_no_image() -> None:
    assert embedded_images(GROUPS[:1], np.zeros((1, 4), np.int32), IMAGES) == 0


def test_an_image_that_is_behind_the_hit_is_behind_the_count() -> None:
    rows = np.asarray([(0, 1, 3, 8)], np.int32)
    assert embedded_images(GROUPS, rows, IMAGES) == 2


def test_a_second_request_about_an_image_runs_no_encoder() -> None:
    """Whatever text comes before it."""
    served = ServedPictures(PATCHES, batched=23)
    for seed in range(3):
        served.asked(f"q{seed}", pictured(PATCHES, text(5 + seed, seed), 0, text(9, seed)))
    assert served.store.encoder_runs == 1
    served.asked("other", pictured(PATCHES, text(4), 0, text(3), 1, text(2)))
    served.check()


def test_embeddings_that_were_evicted_are_made_again() -> None:
    large_bytes = ServedPictures(PATCHES).layout.large_page_bytes
    served = ServedPictures(PATCHES, kv_bytes=10 * large_bytes, max_model_len=160)
    for number, seed in enumerate((0, 1, 2, 0)):
        served.say(f"q{number}", pictured(PATCHES, text(9, number), seed, text(60, number)))
        served.run()
    assert served.store.encoder_runs == 4
    served.check()
