"""Routing by what instances have cached: how much a hit is worth, and when it is not enough."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvell.cluster.routing.costs import RequestView, first_token_seconds, queues_seconds
from kvell.cluster.routing.policies import (
    COMPUTE_WEIGHT,
    LongestPrefix,
    PromptTreeBased,
    load,
    router_named,
)
from kvell.cost.prices import ExecCosts, pairs
from kvell.engine.protocol.statistics import InstanceReport
from tests.reports import Routable, facts

COSTS = ExecCosts(
    request_seconds=0.01,
    token_seconds=1e-3,
    pair_seconds=1e-7,
    output_token_seconds=4e-3,
    held_token_seconds=1e-7,
)
PRICED = InstanceReport(facts(prices=COSTS))
NAMES = ("mixed-0", "mixed-1", "mixed-2", "mixed-3")
counts = st.integers(0, 4000)
views = st.builds(
    Routable,
    st.sampled_from(NAMES),
    counts,
    counts,
    counts,
    counts,
    st.integers(0, 10**7),
    st.integers(0, 30),
    st.integers(0, 10**5),
    st.just(PRICED),
)
clusters = st.lists(views, min_size=1, max_size=4, unique_by=lambda one: one.instance_id)
hits = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 999))
requests = st.builds(
    RequestView,
    st.integers(1000, 3000),
    counts,
    st.just(""),
    hits,
    st.none() | st.floats(0.0, 10.0),
)


def view(
    name: str, prompts: int = 0, tokens: int = 0, held: int = 0, costs: ExecCosts = COSTS
) -> Routable:
    """An instance with so many prompts of so many tokens each, none of them cached.

    :param held: tokens of other requests.
    """
    return Routable(
        name,
        prompts * tokens,
        held,
        0,
        prompts * tokens,
        prompts * pairs(tokens, 0) if prompts else 0,
        held_tokens=held,
        report=InstanceReport(facts(prices=costs)),
    )


def request(tokens: int, found: Mapping[str, int], deadline: float | None = None) -> RequestView:
    return RequestView(tokens, 100, "", found, deadline)


class TestLongestPrefix:
    @given(requests, clusters)
    def test_nobody_has_more_of_the_prompt(self, one: RequestView, cluster: list[Routable]) -> None:
        chosen = LongestPrefix().choose(one, cluster)
        most = max(one.hits.get(each.instance_id, 0) for each in cluster)
        assert one.hits.get(chosen, 0) == most
        equals = [each for each in cluster if one.hits.get(each.instance_id, 0) == most]
        found = next(each for each in equals if each.instance_id == chosen)
        assert load(found) == min(map(load, equals))

    def test_without_a_hit_the_load_decides(self) -> None:
        cluster = [view("mixed-0", 1, 10), view("mixed-1"), view("mixed-2")]
        router = router_named("longest-prefix")
        chosen = [router.choose(request(50, {}), cluster) for _ in range(3)]
        assert chosen == ["mixed-1", "mixed-2", "mixed-1"]

    def test_an_instance_that_may_get_nothing_is_no_obstacle(self) -> None:
        found = {"mixed-9": 40, "mixed-1": 20}
        cluster = [view("mixed-0"), view("mixed-1", 1, 10)]
        assert LongestPrefix().choose(request(50, found), cluster) == "mixed-1"


class TestPromptTreeBased:
    @given(requests, clusters, st.sampled_from((1.0, COMPUTE_WEIGHT)))
    def test_nobody_has_a_lower_price(
        self, one: RequestView, cluster: list[Routable], weight: float
    ) -> None:
        """Of those that keep the deadline, if any does.  A token that is computed again counts by
        how many have it."""
        chosen = PromptTreeBased(weight).choose(one, cluster)

        def computing(hit: int) -> float:
            ends = sorted({hit, *(other for other in one.hits.values() if other > hit)})
            seconds = COSTS.exec_seconds(one.prompt_tokens, ends[-1])
            for end, longer in pairwise(ends):
                more = COSTS.exec_seconds(one.prompt_tokens, end)
                more -= COSTS.exec_seconds(one.prompt_tokens, longer)
                seconds += more / sum(other >= longer for other in one.hits.values())
            return seconds

        def price(each: Routable) -> tuple[bool, float]:
            hit = one.hits.get(each.instance_id, 0)
            first = first_token_seconds(each, one.prompt_tokens, hit)
            late = one.deadline_seconds is not None and first > one.deadline_seconds
            return late, queues_seconds([each], one)[0] + weight * computing(hit)

        prices = {each.instance_id: price(each) for each in cluster}
        late, least = min(prices.values())
        assert prices[chosen][0] == late
        assert prices[chosen][1] == pytest.approx(least)

    def test_a_text_that_many_have_is_soon_everywhere(self) -> None:
        """A queue that one holder of a text is worth is too long when there are three."""
        cluster = [view(name, 2, 500) for name in NAMES[:3]] + [view(NAMES[3])]
        router = PromptTreeBased()
        saved = COSTS.exec_seconds(1000, 0) - COSTS.exec_seconds(1000, 800)
        waits = queues_seconds([cluster[0]], request(1000, {}))[0]
        assert saved < waits < COMPUTE_WEIGHT * saved
        assert router.choose(request(1000, {"mixed-0": 800}), cluster) == "mixed-0"
        found = dict.fromkeys(NAMES[:3], 800)
        assert router.choose(request(1000, found), cluster) == "mixed-3"

    def test_what_one_alone_has_more_of_keeps_its_price(self) -> None:
        """All have the beginning; a conversation's own part is still where it was."""
        cluster = [view("mixed-0", 2, 500), *(view(name) for name in NAMES[1:])]
        found = {"mixed-0": 1900, **dict.fromkeys(NAMES[1:], 1000)}
        assert PromptTreeBased().choose(request(2000, found), cluster) == "mixed-0"
        found["mixed-0"] = 1100
        assert PromptTreeBased().choose(request(2000, found), cluster) != "mixed-0"

    def test_a_hit_decides_between_equal_queues(self) -> None:
        cluster = [view(name, 2, 500) for name in NAMES]
        assert PromptTreeBased(1).choose(request(900, {"mixed-2": 16}), cluster) == "mixed-2"

    @pytest.mark.parametrize(
        ("policy", "weight"), [(PromptTreeBased(1), 1), (PromptTreeBased(), COMPUTE_WEIGHT)]
    )
    @given(st.integers(0, 40), st.integers(1, 999))
    def test_a_hit_does_not_outweigh_a_longer_queue(
        self, policy: PromptTreeBased, weight: float, prompts: int, hit: int
    ) -> None:
        """The one with the hit gets the request only if what waits there takes less time than the
        hit saves; by default several times less, since all who come later wait too."""
        cluster = [view("mixed-0", prompts, 100), view("mixed-1")]
        chosen = policy.choose(request(1000, {"mixed-0": hit}), cluster)
        saved = COSTS.exec_seconds(1000, 0) - COSTS.exec_seconds(1000, hit)
        waits = queues_seconds([cluster[0]], request(1000, {}))[0]
        if abs(weight * saved - waits) > 1e-6:
            assert (chosen == "mixed-0") == (waits < weight * saved)

    def test_a_popular_prefix_does_not_flood_one_instance(self) -> None:
        """All requests share 1,000 of 1,100 tokens, and come faster than one instance computes
        them.  What an instance gets it has cached from then on."""
        router, queued = PromptTreeBased(1), Counter[str]()
        cached: dict[str, int] = {}
        for _ in range(200):
            cluster = [replace(view(name), uncached_prompt_tokens=queued[name]) for name in NAMES]
            chosen = router.choose(request(1100, dict(cached)), cluster)
            queued[chosen] += 1100 - cached.get(chosen, 0)
            cached[chosen] = 1000
        assert len(cached) == len(NAMES)
        assert max(queued.values()) - min(queued.values()) <= 1100
        flooded = Counter(
            LongestPrefix().choose(request(1100, {"mixed-0": 1000}), [view(n) for n in NAMES])
            for _ in range(200)
        )
        assert flooded == {"mixed-0": 200}

    def test_no_more_work_is_done_than_without_a_cache(self) -> None:
        """With little load a popular prefix is computed once, not once for each instance."""
        router, cluster = PromptTreeBased(1), [view(name) for name in NAMES]
        found: dict[str, int] = {}
        for _ in range(50):
            found[router.choose(request(1100, dict(found)), cluster)] = 1000
        assert len(found) == 1

    def test_long_prompts_weigh_more_than_their_tokens(self) -> None:
        """Attention over a long prompt takes longer than over as many tokens of short ones."""
        steep = structs.replace(COSTS, pair_seconds=1e-5)
        cluster = [view("mixed-0", 1, 20_000, 0, steep), view("mixed-1", 20, 1000, 0, steep)]
        assert cluster[0].uncached_prompt_tokens == cluster[1].uncached_prompt_tokens
        assert PromptTreeBased(1).choose(request(100, {}), cluster) == "mixed-1"

    def test_what_is_decoded_counts_by_the_steps_that_take_longer(self) -> None:
        cluster = [view("mixed-0", held=50_000), view("mixed-1", held=10_000)]
        router = PromptTreeBased()
        assert router.choose(request(900, {}), cluster) == "mixed-1"
        assert router.choose(request(900, {"mixed-0": 64}), cluster) == "mixed-1"
        assert router.choose(request(900, {"mixed-0": 800}), cluster) == "mixed-0"

    def test_answers_that_run_do_not_outweigh_a_conversation(self) -> None:
        """They have thousands of tokens yet to make, but all decode together."""
        busy = replace(view("mixed-0", held=20_000), outstanding_output_tokens=9_000)
        cluster = [busy, view("mixed-1", held=16_000)]
        assert PromptTreeBased().choose(request(900, {"mixed-0": 160}), cluster) == "mixed-0"

    def test_an_idle_instance_begins_at_once(self) -> None:
        cluster = [replace(view("mixed-0"), running_requests=1), view("mixed-1")]
        chosen = [PromptTreeBased().choose(request(900, {}), cluster) for _ in range(3)]
        assert chosen == ["mixed-1"] * 3

    def test_equal_prices_go_in_turn(self) -> None:
        router, cluster = PromptTreeBased(1), [view(name) for name in NAMES]
        found = dict.fromkeys(NAMES, 48)
        chosen = [router.choose(request(100, found), cluster) for _ in range(8)]
        assert chosen == [*NAMES, *NAMES]

    def test_who_would_be_late_loses(self) -> None:
        """Answers of long requests run at mixed-0: it has less to compute before a first token,
        and each of its steps takes longer."""
        cluster = [view("mixed-0", held=1_000_000), view("mixed-1", 4, 1000)]
        router = PromptTreeBased(1)
        assert router.choose(request(500, {}), cluster) == "mixed-1"
        assert router.choose(request(500, {}, deadline=60.0), cluster) == "mixed-1"
        assert router.choose(request(500, {}, deadline=1.0), cluster) == "mixed-0"
        assert router.choose(request(500, {}, deadline=0.0), cluster) == "mixed-1"  # all are late

    @pytest.mark.parametrize(("held_seconds", "chosen"), [(1e-7, "mixed-0"), (1e-8, "mixed-1")])
    def test_prices_are_those_that_an_instance_reports(
        self, held_seconds: float, chosen: str
    ) -> None:
        costs = structs.replace(COSTS, held_token_seconds=held_seconds)
        cluster = [view("mixed-0", 1, 200, 0, costs), view("mixed-1", 0, 0, 100_000, costs)]
        assert router_named("prompt-tree").choose(request(9, {}), cluster) == chosen


@pytest.mark.parametrize("name", ["longest-prefix", "prompt-tree"])
def test_they_can_be_asked_for_by_name(name: str) -> None:
    cluster = [view("mixed-0"), view("mixed-1")]
    assert router_named(name).choose(request(100, {"mixed-1": 64}), cluster) == "mixed-1"
