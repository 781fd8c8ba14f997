"""The engine core: how requests end, what is refused, what is counted."""

import itertools

import numpy as np
import pytest

from kvell.engine.protocol.messages import Cancel, Finished, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.plan import StepResult
from kvell.vocabulary import RequestId, StepNumber
from tests.engine.conftest import EOS, make_layout, make_submit
from tests.engine.traffic import Traffic, limits
from tests.models.cases import covering

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


@pytest.fixture
def traffic() -> Traffic:
    return Traffic(make_layout((0, 9), 40), limits(batched=16))


def used(traffic: Traffic) -> int:
    return sum(traffic.core.memory.snapshot().used)


def sampled(name: str, sampling: SamplingParams, prompt: bytes = b"\1\0\0\0") -> Submit:
    return Submit(RequestSpec(RequestId(name), prompt, sampling))


def test_a_request_cancelled_in_flight_keeps_its_pages_until_the_result(traffic: Traffic) -> None:
    traffic.submit("a", PROMPT)
    plan = traffic.plan()
    held = used(traffic)
    assert held > 0
    assert traffic.cancel("a") == []
    assert used(traffic) == held
    (event,) = traffic.finish_step(plan)
    assert isinstance(event, Finished)
    assert (event.reason, event.output_tokens) == ("cancelled", 0), "its token is not sent"
    assert used(traffic) == 0
    assert not traffic.core.has_work


def test_what_a_cancelled_request_computed_is_cached(traffic: Traffic) -> None:
    traffic.submit("a", PROMPT)
    plan = traffic.plan()
    traffic.cancel("a")
    traffic.finish_step(plan)
    traffic.submit("b", PROMPT)
    traffic.run()
    assert traffic.finished("b").cached_tokens == len(PROMPT) - 1, "all but the last token"


@covering(
    {
        "windows": [(0,), (0, 9), (5, 9), (0, 0, 17)],
        "shared": [0, 3, 8, 13],
    },
    together=1,
)
def test_what_a_request_put_into_the_cache_is_what_a_repeat_finds(
    windows: tuple[int, ...], shared: int
) -> None:
    traffic = Traffic(make_layout(windows, 60), limits(batched=16))
    prompts = {
        length: [*range(1, 1 + shared), *(20 + (7 * length + i) % 29 for i in range(length))]
        for length in range(1, 21)
    }
    traffic.submit("before", [*range(1, 1 + shared), 49, 49])
    traffic.run()
    for length, prompt in prompts.items():
        ends = []
        for time in range(3):
            traffic.submit(f"{length} {time}", prompt, 1 + length % 7)
            traffic.run()
            ends.append(traffic.finished(f"{length} {time}"))
        for end, again in itertools.pairwise(ends):
            assert end.cache_write_tokens == max(0, again.cached_tokens - end.cached_tokens)
        if not any(windows):  # pages behind a window are kept once that has proved useful
            assert ends[0].cached_tokens + ends[0].cache_write_tokens == len(prompt) - 1


def test_only_what_is_kept_counts_as_put_into_the_cache() -> None:
    traffic = Traffic(make_layout((0, 9), 12), limits(batched=16))
    for name in "ab":
        traffic.submit(name, [ord(name) % 40] * 4 + [*range(30)], 4, salt=name)
        traffic.run()
    assert traffic.finished("b").cache_write_tokens > 0
    traffic.submit("c", PROMPT)
    traffic.cancel("c")
    assert traffic.finished("c").cache_write_tokens == 0, "it never ran"
    scored = sampled("d", SamplingParams(max_tokens=2, prompt_logprobs=1), b"\1\0\0\0" * 9)
    traffic.tell(scored)
    traffic.prompts["d"] = [1] * 9
    traffic.cancel("d")
    assert traffic.finished("d").cache_write_tokens == 0


def test_a_waiting_request_is_cancelled_at_once(traffic: Traffic) -> None:
    traffic.submit("a", PROMPT)
    (event,) = traffic.cancel("a")
    assert event == Finished(RequestId("a"), 0, "cancelled", prompt_tokens=10)
    assert (traffic.core.counters.num_waiting, traffic.core.has_work) == (0, False)


def test_a_request_cancelled_between_steps_is_released_by_the_next_plan(traffic: Traffic) -> None:
    traffic.submit("a", PROMPT)
    traffic.submit("b", PROMPT[::-1])
    traffic.step()
    (handle,) = [w.handle for w in traffic.plans[0].work if w.request_id == "a"]
    (event,) = traffic.cancel("a")
    assert isinstance(event, Finished)
    assert event.output_tokens == 1
    assert traffic.plan().released == (handle,)


def test_cancelling_twice_or_somebody_unknown_is_harmless(traffic: Traffic) -> None:
    traffic.submit("a", PROMPT)
    plan = traffic.plan()
    assert traffic.cancel("a") == traffic.cancel("a") == traffic.cancel("nobody") == []
    assert len(traffic.finish_step(plan)) == 1
    assert traffic.core.cancel(Cancel(RequestId("a"))) == []
    assert traffic.core.stats().finished["cancelled"] == 1


def test_a_stop_token_is_the_last_one(traffic: Traffic) -> None:
    traffic.tell(sampled("a", SamplingParams(temperature=0, stop_token_ids=(7, 8))))
    traffic.answer(traffic.plan(), 5)
    tokens, finished = traffic.answer(traffic.plan(), 8)
    assert tokens == Tokens(RequestId("a"), 0, 1, (8,))
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.output_tokens) == ("stop", 2)


@pytest.mark.parametrize("ignored", [False, True])
def test_end_of_sequence_ends_a_request_unless_it_is_ignored(
    traffic: Traffic, ignored: bool
) -> None:
    traffic.tell(sampled("a", SamplingParams(temperature=0, ignore_eos=ignored)))
    events = traffic.answer(traffic.plan(), EOS)
    assert [e.reason for e in events if isinstance(e, Finished)] == ([] if ignored else ["stop"])


def test_a_stop_token_counts_even_where_end_of_sequence_is_ignored(traffic: Traffic) -> None:
    params = SamplingParams(temperature=0, stop_token_ids=(EOS,), ignore_eos=True)
    traffic.tell(sampled("a", params))
    assert isinstance(traffic.answer(traffic.plan(), EOS)[-1], Finished)


@pytest.mark.parametrize("wanted", [1, 5])
def test_length_ends_a_request(traffic: Traffic, wanted: int) -> None:
    traffic.submit("a", PROMPT, max_tokens=wanted)
    traffic.run()
    finished = traffic.finished("a")
    assert (finished.reason, finished.prompt_tokens, finished.output_tokens) == (
        "length",
        10,
        wanted,
    )


@pytest.mark.parametrize("wanted", [None, 1000])
def test_the_models_limit_is_a_length_too(traffic: Traffic, wanted: int | None) -> None:
    params = SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True)
    traffic.tell(sampled("a", params, bytes(4 * 60)))
    while traffic.core.has_work:
        plan = traffic.plan()
        traffic.answer(plan, *[3 for w in plan.work if w.samples])
    assert traffic.finished("a").output_tokens == 64 - 60


def test_tokens_are_numbered_and_carry_their_attempt(traffic: Traffic) -> None:
    traffic.tell(
        Submit(RequestSpec(RequestId("a"), b"\1\0\0\0", SamplingParams(temperature=0)), attempt=3)
    )
    traffic.answer(traffic.plan(), 4)
    traffic.answer(traffic.plan(), 5)
    assert traffic.events == [
        Tokens(RequestId("a"), 3, 0, (4,)),
        Tokens(RequestId("a"), 3, 1, (5,)),
    ]


def refusal(traffic: Traffic, prompt: bytes) -> Finished:
    (event,) = traffic.core.submit(sampled("a", SamplingParams(), prompt))
    assert isinstance(event, Finished)
    assert (event.reason, event.try_later) == ("refused", False)
    return event


def int32(*values: int) -> bytes:
    return np.asarray(values, "<i4").tobytes()


@pytest.mark.parametrize(
    ("prompt", "value", "remedy"),
    [
        (b"", "prompt='': ", "at least one"),
        (bytes(4 * 64), "prompt=64 tokens: ", "63 tokens"),
        (int32(1, 50, 2), "prompt=[… 50 …]: ", "from 0 to 49"),
        (int32(1, -3, 2), "prompt=[… -3 …]: ", "from 0 to 49"),
    ],
    ids=["empty", "too long", "too large an id", "a negative id"],
)
def test_what_can_never_be_served_is_refused_by_field_value_and_remedy(
    traffic: Traffic, prompt: bytes, value: str, remedy: str
) -> None:
    event = refusal(traffic, prompt)
    assert event.field == "prompt"
    assert event.prompt_tokens == len(prompt) // 4
    assert event.message.startswith(value)
    assert remedy in event.message.partition("; ")[2]
    assert not traffic.core.has_work
    stats = traffic.core.stats()
    assert stats.finished["refused"] == stats.rungs["refuse"] == 1


def test_a_prompt_that_leaves_room_for_one_token_is_served(traffic: Traffic) -> None:
    traffic.submit("a", [1] * 63, max_tokens=8)
    traffic.run()
    assert traffic.finished("a").output_tokens == 1


def test_a_name_in_use_is_refused_and_free_again_afterwards(traffic: Traffic) -> None:
    traffic.submit("a", PROMPT, max_tokens=1)
    event = refusal(traffic, b"\1\0\0\0")
    assert (event.field, event.message) == ("request_id", "request_id=a: is in use; choose another")
    traffic.run()
    assert traffic.core.submit(make_submit("a", PROMPT)) == []


def test_a_second_plan_waits_for_the_result_of_the_first(traffic: Traffic) -> None:
    traffic.submit("a", PROMPT)
    plan = traffic.plan()
    with pytest.raises(RuntimeError, match=f"result of step {plan.step} is missing"):
        traffic.plan()
    traffic.finish_step(plan)
    assert traffic.plan().step == plan.step + 1


def test_a_result_that_was_not_asked_for_is_refused_and_changes_nothing(traffic: Traffic) -> None:
    traffic.submit("a", PROMPT)
    plan = traffic.plan()
    before = traffic.core.memory.snapshot()
    with pytest.raises(ValueError, match="step 9 was not asked for"):
        traffic.commit(StepResult(StepNumber(9), (1,)))
    assert traffic.core.memory.snapshot() == before
    traffic.finish_step(plan)
    with pytest.raises(ValueError, match="was not asked for"):
        traffic.answer(plan, 1)


def seed_of(name: str, sampling: SamplingParams) -> int | None:
    traffic = Traffic(make_layout((0,), 10), limits())
    traffic.tell(sampled(name, sampling))
    (work,) = traffic.plan().work
    assert work.spec.sampling is not None
    return work.spec.sampling.seed


def test_a_request_without_a_seed_draws_from_its_name() -> None:
    warm = SamplingParams(temperature=0.7)
    assert seed_of("a", warm) == seed_of("a", warm) is not None
    assert seed_of("a", warm) != seed_of("b", warm)


def test_a_given_seed_is_kept_and_greedy_needs_none() -> None:
    assert seed_of("a", SamplingParams(temperature=0.7, seed=11)) == 11
    assert seed_of("a", SamplingParams(temperature=0)) is None
