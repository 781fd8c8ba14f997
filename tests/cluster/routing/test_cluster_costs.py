"""Prices of prompts: what they are made of, and when pages are fetched instead of computed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvell.cluster.routing.costs import (
    MOST_SOURCES,
    RequestView,
    answer_seconds,
    first_token_seconds,
    prompt_work,
    pull_or_recompute,
    queues_seconds,
)
from kvell.cost.amounts import shape_of
from kvell.cost.model import prefill_seconds
from kvell.cost.prices import ExecCosts, pairs, prices_of
from kvell.cost.work import Work
from kvell.engine.protocol.statistics import InstanceReport
from kvell.memory import GroupKind, LayerSpec
from tests.reports import Routable, facts

COSTS = ExecCosts(
    request_seconds=0.01,
    token_seconds=1e-3,
    pair_seconds=1e-7,
    output_token_seconds=4e-3,
    output_share=0.5,
    held_token_seconds=1e-7,
    fetch_request_seconds=0.05,
    fetch_token_seconds=1e-5,
    swap_token_seconds=1e-6,
    chunk_tokens=512,
)
PRICED = InstanceReport(facts(prices=COSTS))
lengths = st.integers(1, 3000)


@dataclass(frozen=True)
class Steps:
    request_seconds: float = 2e-3
    token_seconds: float = 3e-4
    pair_seconds: float = 4e-8

    def step_seconds(self, work: Sequence[Work]) -> float:
        computed = sum(one.count for one in work)
        read = sum(pairs(one.start + one.count, one.start) if one.count > 0 else 0 for one in work)
        requests = sum(one.num_logits for one in work)
        return (
            requests * self.request_seconds
            + computed * self.token_seconds
            + read * self.pair_seconds
        )


class TestExec:
    @given(lengths, st.integers(0, 3000))
    def test_pairs_are_counted_one_by_one(self, tokens: int, cached: int) -> None:
        first = min(cached, tokens - 1)
        assert pairs(tokens, cached) == sum(range(first + 1, tokens + 1))

    @given(lengths, lengths, st.integers(0, 40))
    def test_a_longer_hit_never_costs_more(self, tokens: int, cached: int, running: int) -> None:
        longer = COSTS.exec_seconds(tokens, cached, running)
        assert longer <= COSTS.exec_seconds(tokens, cached // 2, running)
        assert longer >= COSTS.request_seconds + COSTS.token_seconds

    def test_it_is_the_sum_of_its_parts(self) -> None:
        seconds = 0.01 + 600 * 1e-3 + (600 * 400 + 600 * 601 / 2) * 1e-7
        assert COSTS.exec_seconds(1000, 400) == pytest.approx(seconds)
        assert COSTS.exec_seconds(1000, 400, 5) == pytest.approx(seconds + 2 * 5 * 4e-3)

    @given(
        st.lists(st.tuples(lengths, lengths), max_size=6),
        st.integers(0, 9),
        st.integers(0, 50_000),
        st.integers(0, 500),
        st.integers(0, 600),
    )
    def test_a_queue_is_its_prompts_and_what_its_steps_take_longer(
        self, prompts: list[tuple[int, int]], running: int, held: int, output: int, hit: int
    ) -> None:
        new = sum(max(1, tokens - cached) for tokens, cached in prompts)
        view = Routable(
            "mixed-0",
            sum(tokens for tokens, _ in prompts),
            4_000,
            0,
            new,
            sum(pairs(tokens, cached) for tokens, cached in prompts),
            running,
            held,
            report=PRICED,
        )
        # Alone each takes its exec(x, y); together they share the price of steps.
        apart = sum(COSTS.exec_seconds(tokens, cached) - 0.01 for tokens, cached in prompts)
        before = apart + -(-new // COSTS.chunk_tokens) * 0.01 + (0.005 if running else 0.0)
        # Half a step, those of the prompts, its own, and half of its answer's.
        steps = 0.5 + (new + 700 - hit) / COSTS.chunk_tokens + output / 2
        request = RequestView(700, output, "", {"mixed-0": hit})
        told = queues_seconds([view], request)
        assert told == [pytest.approx(before + steps * held * 1e-7)]

    def test_what_others_answer_is_no_delay_by_itself(self) -> None:
        request = RequestView(700, 100, "")
        few, many = Routable("mixed-0", 0, 10, 0), Routable("mixed-1", 0, 9_000, 0)
        assert queues_seconds([few, many], request) == [0.0, 0.0]

    def test_a_first_token_waits_for_prompts_and_not_for_answers(self) -> None:
        idle = Routable("mixed-0", report=PRICED)
        decodes = replace(idle, outstanding_output_tokens=10_000, running_requests=10)
        queued = replace(idle, uncached_prompt_tokens=500)
        alone = first_token_seconds(idle, 600, 100)
        assert alone == pytest.approx(COSTS.exec_seconds(600, 100))
        assert first_token_seconds(decodes, 600, 100) == pytest.approx(alone + 10 * 4e-3)
        assert first_token_seconds(queued, 600, 100) == pytest.approx(alone + 0.51)
        both = replace(queued, running_requests=10)  # a step before it, and its own
        assert first_token_seconds(both, 600, 100) == pytest.approx(alone + 0.51 + 2 * 0.04)

    def test_a_first_token_comes_at_the_pace_of_the_instance_without_what_is_done(self) -> None:
        queued = Routable("mixed-0", report=PRICED, uncached_prompt_tokens=900)
        alone = COSTS.exec_seconds(600, 100)
        part_done = first_token_seconds(queued, 600, 100, done_seconds=0.5)
        assert part_done == pytest.approx(alone + 0.92 - 0.5)
        assert first_token_seconds(queued, 600, 100, done_seconds=9.0) == pytest.approx(alone)
        slow = replace(queued, slows=2.0)
        assert first_token_seconds(slow, 600, 100) == pytest.approx(2 * (alone + 0.92))

    def test_pages_are_fetched_while_earlier_prompts_are_computed(self) -> None:
        queued = Routable("mixed-0", report=PRICED, uncached_prompt_tokens=900)
        alone = COSTS.exec_seconds(600, 100)
        for fetch, wait in ((0.5, 0.92), (3.0, 3.0)):
            assert first_token_seconds(queued, 600, 100, fetch) == pytest.approx(alone + wait)

    @given(lengths, lengths, st.integers(0, 40))
    def test_the_work_of_a_prompt_has_its_price(self, tokens: int, hit: int, running: int) -> None:
        work = prompt_work(
            Routable("mixed-0", report=PRICED, running_requests=running), tokens, hit
        )
        seconds = work.step_seconds + work.tokens * COSTS.token_seconds
        seconds += work.pairs * COSTS.pair_seconds
        assert seconds == pytest.approx(COSTS.exec_seconds(tokens, hit, running))


class TestAnswers:
    """An instance answers another one between its steps, twice for one transfer."""

    IDLE = Routable("mixed-0", report=PRICED)

    def test_an_idle_one_answers_at_once(self) -> None:
        assert answer_seconds(self.IDLE, 0.0) == 0.0

    def test_one_that_decodes_ends_its_step_and_one_more(self) -> None:
        decodes = replace(self.IDLE, running_requests=8, held_tokens=4000)
        assert answer_seconds(decodes, 0.0) == 1.5 * COSTS.step_seconds(8, 4000)

    @pytest.mark.parametrize(
        ("tokens", "done", "left"),
        [(500, 0.0, 0.51), (500, 0.4, 0.11), (500, 3.0, 0.0), (5120, 0.0, 1.044)],
        ids=["its prompt", "a part is done", "all is done", "two steps of ten"],
    )
    def test_one_with_prompts_ends_them_or_two_steps(
        self, tokens: int, done: float, left: float
    ) -> None:
        busy = replace(self.IDLE, uncached_prompt_tokens=tokens)
        assert answer_seconds(busy, done) == pytest.approx(left)


class TestFitted:
    LAYERS = (
        LayerSpec(0, GroupKind.FULL, 2, 64, 2),
        LayerSpec(1, GroupKind.FULL, 2, 64, 2),
    )

    def costs(self, model: Steps) -> ExecCosts:
        return prices_of(
            model,
            shape_of(self.LAYERS),
            fetch_bytes_per_second=1e9,
            swap_bytes_per_second=4e9,
        )

    @given(st.floats(0, 1e-2), st.floats(1e-6, 1e-3), st.floats(0, 1e-6))
    def test_known_prices_are_found(self, request: float, token: float, pair: float) -> None:
        model = Steps(request, token, pair)
        found = self.costs(model)
        for tokens in (700, 2048, 9000):
            for cached in (0, tokens // 3):
                exact = prefill_seconds(model, tokens, cached / tokens)
                assert found.exec_seconds(tokens, cached) == pytest.approx(exact, rel=0.02)

    def test_a_long_prompt_costs_no_more_where_its_first_tokens_are_free(self) -> None:
        """A mixture of experts reads all its weights for a short prompt too."""

        class Reading:
            def step_seconds(self, work: Sequence[Work]) -> float:
                return 0.01

        found = prices_of(
            Reading(), shape_of(self.LAYERS), fetch_bytes_per_second=1e9, swap_bytes_per_second=1e9
        )
        assert found.token_seconds == pytest.approx(0)
        assert found.exec_seconds(8192, 0) == pytest.approx(0.04)

    def test_bytes_come_from_the_layers(self) -> None:
        found = self.costs(Steps())
        token_bytes = 2 * 2 * 2 * 64 * 2
        assert found.fetch_token_seconds == pytest.approx(token_bytes / 1e9)
        assert found.swap_token_seconds == pytest.approx(token_bytes / 4e9)

    def test_an_answers_token_is_one_of_a_small_step(self) -> None:
        found = self.costs(Steps())
        assert found.output_token_seconds == pytest.approx(2e-3 + 3e-4 + 1025 * 4e-8)

    def test_a_held_token_is_what_one_more_request_adds(self) -> None:
        """Its own query and what serving it takes are part of that."""
        found = self.costs(Steps())
        more = 2e-3 + 3e-4 + 1025 * 4e-8
        assert found.held_token_seconds == pytest.approx(more / 1024)


class TestPullOrRecompute:
    @given(
        lengths,
        st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 2999)),
        st.sampled_from("abcdef"),
    )
    def test_equation_2(self, tokens: int, hits: dict[str, int], chosen: str) -> None:
        hits = {name: min(length, tokens - 1) for name, length in hits.items() if tokens > 1}
        source = pull_or_recompute(tokens, chosen, hits, COSTS)
        own = hits.get(chosen, 0)

        def saves(name: str) -> float:
            saved = COSTS.exec_seconds(tokens, own) - COSTS.exec_seconds(tokens, hits[name])
            return saved - COSTS.fetch_seconds(hits[name] - own)

        more = {name: saves(name) for name in hits if hits[name] > own}
        best = max(more.values(), default=-1.0)
        assert (source == "") == (best < 0)
        assert not source or more[source] == best

    def test_the_best_of_equals_is_the_first_by_name(self) -> None:
        hits = {"c": 900, "a": 900, "d": 100, "e": 130}
        assert pull_or_recompute(1000, "d", hits, COSTS) == "a"

    def test_a_slow_link_makes_computing_quicker(self) -> None:
        slow = structs.replace(COSTS, fetch_token_seconds=2e-3)
        assert pull_or_recompute(1000, "a", {"b": 900}, COSTS) == "b"
        assert pull_or_recompute(1000, "a", {"b": 900}, slow) == ""

    def test_one_that_is_busy_is_not_asked_if_another_saves_more(self) -> None:
        hits = {"a": 800, "b": 900, "c": 850}
        for waits, source in (
            ({"b": 0.3, "c": 0.01}, "c"),
            ({"b": 0.3, "c": 0.3}, "a"),
            ({"a": 9.0, "b": 9.0, "c": 9.0}, ""),
            ({"a": 9.0, "b": 0.5, "c": 9.0}, "b"),
        ):
            told = pull_or_recompute(1000, "d", hits, COSTS, lambda n, w=waits: w.get(n, 0.0))  # type: ignore[misc]
            assert told == source

    def test_of_many_only_some_are_looked_at(self) -> None:
        looked_at: list[str] = []

        def waits(name: str) -> float:
            looked_at.append(name)
            return 0.2

        hits = {f"i{number}": 900 for number in range(1000)}
        assert pull_or_recompute(1000, "d", hits, COSTS, waits) == "i0"
        assert len(looked_at) <= MOST_SOURCES

    def test_it_agrees_with_the_cost_models_rule(self) -> None:
        model = Steps()
        costs = prices_of(
            model,
            shape_of(TestFitted.LAYERS),
            fetch_bytes_per_second=1e9,
            swap_bytes_per_second=1e9,
        )
        for hit in range(100, 2000, 100):
            seconds = costs.fetch_seconds(hit)
            saved = prefill_seconds(model, 2000, 0.0) - prefill_seconds(model, 2000, hit / 2000)
            source = pull_or_recompute(2000, "a", {"b": hit}, costs)
            assert (source == "b") == (seconds <= saved)


def test_nothing_is_fetched_for_nothing() -> None:
    assert COSTS.fetch_seconds(0) == 0.0
    assert COSTS.fetch_seconds(1000) == pytest.approx(0.06)
