"""Routing policies: what they promise, over any instances and requests."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.cluster.routing.costs import RequestView
from kvell.cluster.routing.instance_pace import FIRST_REQUESTS, Ramp
from kvell.cluster.routing.policies import (
    DEFAULT_ROUTING,
    ROUTINGS,
    BySession,
    LeastLoad,
    load,
    router_named,
)
from kvell.cost.prices import PROMPT_TOKENS_PER_OUTPUT_TOKEN
from kvell.errors import ChangeSomething
from tests.reports import Routable

ids = st.integers(0, 20).map(lambda number: f"mixed-{number}")
counts = st.integers(0, 6)
views = st.builds(Routable, ids, counts, counts, counts)
clusters = st.lists(views, min_size=1, max_size=8, unique_by=lambda one: one.instance_id)
sessions = st.text(st.characters(), max_size=12)
requests = st.builds(RequestView, counts, counts, sessions)


def view(instance_id: str, prompt: int = 0, output: int = 0, free: int = 0) -> Routable:
    return Routable(instance_id, prompt, output, free)


def request(session: str = "") -> RequestView:
    return RequestView(10, 10, session)


@pytest.mark.parametrize("name", ROUTINGS)
@given(st.lists(st.tuples(requests, clusters), max_size=8))
def test_every_policy_returns_an_id_that_it_was_given(
    name: str, asked: list[tuple[RequestView, list[Routable]]]
) -> None:
    router = router_named(name)
    for one, cluster in asked:
        assert router.choose(one, cluster) in {view.instance_id for view in cluster}


@pytest.mark.parametrize("name", ROUTINGS)
@given(st.lists(st.tuples(requests, clusters), max_size=8))
def test_equal_questions_have_equal_answers(
    name: str, asked: list[tuple[RequestView, list[Routable]]]
) -> None:
    one, other = router_named(name), router_named(name)
    for question, cluster in asked:
        assert one.choose(question, cluster) == other.choose(question, cluster[::-1])


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("rounds", [1, 5])
def test_an_idle_cluster_uses_all_its_instances(name: str, rounds: int) -> None:
    router, cluster = router_named(name), [view(f"mixed-{number}") for number in range(3)]
    chosen = Counter(router.choose(request(), cluster) for _ in range(3 * rounds))
    assert set(chosen.values()) == {rounds} and len(chosen) == 3


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ChangeSomething, match=r"--routing=fastest: .*; use one of least-load, "):
        router_named("fastest")


def test_the_default_is_a_policy() -> None:
    assert DEFAULT_ROUTING in ROUTINGS


class TestLeastLoad:
    @given(clusters, st.lists(requests, min_size=1, max_size=5))
    def test_never_chooses_what_another_dominates(
        self, cluster: list[Routable], asked: list[RequestView]
    ) -> None:
        router, by_id = LeastLoad(), {one.instance_id: one for one in cluster}
        for one in asked:
            chosen = by_id[router.choose(one, cluster)]
            assert not any(dominates(other, chosen) for other in cluster)

    def test_counts_tokens_not_requests(self) -> None:
        cluster = [view("mixed-0", prompt=100), view("mixed-1", prompt=90)]
        assert router_named("least-load").choose(request(), cluster) == "mixed-1"

    def test_an_output_token_is_more_work_than_a_prompt_token(self) -> None:
        assert PROMPT_TOKENS_PER_OUTPUT_TOKEN > 1
        cluster = [view("mixed-0", output=100), view("mixed-1", prompt=101)]
        assert router_named("least-load").choose(request(), cluster) == "mixed-1"

    def test_ties_do_not_wait_for_a_busy_instance(self) -> None:
        router = router_named("least-load")
        cluster = [view("mixed-0"), view("mixed-1", prompt=5), view("mixed-2")]
        chosen = [router.choose(request(), cluster) for _ in range(4)]
        assert chosen == ["mixed-0", "mixed-2", "mixed-0", "mixed-2"]


def dominates(other: Routable, chosen: Routable) -> bool:
    """Whether ``other`` has no more of either kind of work, and less of one."""
    fewer_prompts = other.outstanding_prompt_tokens <= chosen.outstanding_prompt_tokens
    fewer_outputs = other.outstanding_output_tokens <= chosen.outstanding_output_tokens
    return fewer_prompts and fewer_outputs and load(other) != load(chosen)


class TestMostFreeMemory:
    @given(clusters, requests)
    def test_nobody_has_more(self, cluster: list[Routable], one: RequestView) -> None:
        chosen = router_named("most-free-memory").choose(one, cluster)
        free = {view.instance_id: view.free_bytes for view in cluster}
        assert free[chosen] == max(free.values())

    def test_of_those_with_equally_much_the_least_load(self) -> None:
        cluster = [view("mixed-0", 5, free=9), view("mixed-1", 4, free=9), view("mixed-2", free=8)]
        assert router_named("most-free-memory").choose(request(), cluster) == "mixed-1"

    def test_a_negative_estimate_is_only_little_memory(self) -> None:
        cluster = [view("mixed-0", free=-9), view("mixed-1", free=-3)]
        assert router_named("most-free-memory").choose(request(), cluster) == "mixed-1"


class TestRoundRobin:
    @given(st.lists(ids, min_size=1, max_size=8, unique=True), st.integers(1, 5))
    def test_is_fair(self, names: list[str], rounds: int) -> None:
        router, cluster = router_named("round-robin"), [view(name) for name in names]
        chosen = Counter(router.choose(request(), cluster) for _ in range(rounds * len(names)))
        assert chosen == dict.fromkeys(names, rounds)

    @given(clusters, clusters)
    def test_goes_on_after_a_change(self, before: list[Routable], after: list[Routable]) -> None:
        router = router_named("round-robin")
        last = router.choose(request(), before)
        following = [router.choose(request(), after) for _ in after]
        assert len(set(following)) == len(after)
        behind = sorted(one.instance_id for one in after if one.instance_id > last)
        assert following[: len(behind)] == behind

    def test_an_instance_that_comes_back_gets_its_turn(self) -> None:
        router = router_named("round-robin")
        both, one = [view("mixed-0"), view("mixed-1")], [view("mixed-1")]
        chosen = [router.choose(request(), cluster) for cluster in (both, one, one, both, both)]
        assert chosen == ["mixed-0", "mixed-1", "mixed-1", "mixed-0", "mixed-1"]


class TestSession:
    def test_a_new_session_goes_where_the_load_is_least(self) -> None:
        cluster = [view("mixed-0", prompt=1), view("mixed-1"), view("mixed-2", prompt=1)]
        assert BySession().choose(request("chat"), cluster) == "mixed-1"

    def test_without_a_session_it_is_least_load(self) -> None:
        router = BySession()
        for prompt in (0, 2):
            cluster = [view("mixed-0", prompt), view("mixed-1", prompt=1)]
            assert router.choose(request(), cluster) == f"mixed-{prompt // 2}"

    @given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 30))
    def test_leaves_home_only_if_computing_the_prompt_again_is_less_work(
        self, home_load: int, other_load: int, prompt: int
    ) -> None:
        router = BySession()
        router.choose(request("chat"), [view("mixed-0"), view("mixed-1", prompt=1)])
        cluster = [view("mixed-0", home_load), view("mixed-1", other_load)]
        chosen = router.choose(RequestView(prompt, 10, "chat"), cluster)
        assert (chosen == "mixed-1") == (home_load > other_load + prompt)

    @given(st.lists(st.tuples(sessions.filter(bool), st.integers(0, 9)), max_size=20))
    def test_equal_load_moves_nobody(self, asked: list[tuple[str, int]]) -> None:
        router, homes = BySession(), dict[str, str]()
        for session, prompt in asked:
            cluster = [view(f"mixed-{number}", prompt) for number in range(3)]
            chosen = router.choose(request(session), cluster)
            assert homes.setdefault(session, chosen) == chosen

    def test_a_session_stays_where_it_moved_to(self) -> None:
        router = BySession()
        both = [view("mixed-0"), view("mixed-1")]
        chosen = [router.choose(request("chat"), cluster) for cluster in (both, both[1:], both)]
        assert chosen == ["mixed-0", "mixed-1", "mixed-1"]

    def test_the_session_asked_for_least_recently_is_forgotten(self) -> None:
        router = BySession(most_sessions=2)
        first, second = [view("mixed-0"), view("mixed-1", 5)], [view("mixed-0", 5), view("mixed-1")]
        for session in ("a", "b", "a", "c"):
            router.choose(request(session), first)
        assert [router.choose(request(one), second) for one in ("a", "b")] == ["mixed-0", "mixed-1"]


def test_grows_with_every_first_token_until_the_credits() -> None:
    ramp, limits = Ramp(FIRST_REQUESTS + 3), []
    for _ in range(4):
        limits.append(ramp.limit)
        ramp.first_token()
    assert limits == [FIRST_REQUESTS, FIRST_REQUESTS + 1, FIRST_REQUESTS + 2, None]
    assert ramp.limit is None


def test_few_credits_are_bound_enough() -> None:
    assert Ramp(FIRST_REQUESTS).limit is None
    assert Ramp(1).limit is None


def test_one_more_is_allowed_below_the_limit() -> None:
    ramp = Ramp(64)
    assert [ramp.allows(in_flight) for in_flight in (0, FIRST_REQUESTS - 1, FIRST_REQUESTS)] == [
        True,
        True,
        False,
    ]


@given(st.integers(1, 300), st.integers(0, 300))
def test_never_allows_less_later(credit: int, tokens: int) -> None:
    ramp = Ramp(credit)
    allowed = 0
    for _ in range(tokens):
        now = sum(ramp.allows(in_flight) for in_flight in range(credit))
        assert now >= max(allowed, min(credit, FIRST_REQUESTS))
        allowed = now
        ramp.first_token()
    assert (ramp.limit is None) == (credit <= FIRST_REQUESTS + tokens)
