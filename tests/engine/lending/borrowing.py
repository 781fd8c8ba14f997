"""Requests with pages on other instances."""

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.engine.moving.handing_over import SECTION_TOKENS, Cluster, Entry, Instance
from tests.engine.moving.machine import NAMES, HandingOver, cluster_of, prompt_of

NAME = "r"

PROMPT = prompt_of(1, 37)

SECTIONS = len(PROMPT) // SECTION_TOKENS


def start(
    mix: str = "full", max_tokens: int = 12, large: int = 60, *, by_queries: bool = False
) -> Cluster:
    cluster = cluster_of(mix, large, by_queries=by_queries)
    cluster.submit(NAME, Entry(PROMPT, max_tokens, ""), "p", "")
    run(cluster, lambda: bool(cluster.entries[NAME].emitted))
    return cluster


def run(cluster: Cluster, until: Callable[[], bool]) -> None:
    """Let everything go on, one step of each at a time."""
    for _ in range(1000):
        if until():
            return
        turn(cluster)
    raise AssertionError("it never happened")


def turn(cluster: Cluster) -> None:
    while cluster.messages:
        cluster.deliver(0)
    for name in NAMES:
        cluster.copy(name, 0, 99)
    while cluster.messages:
        cluster.deliver(0)
    for name in NAMES:
        cluster.step(name)


def away(instance: Instance) -> int:
    request = next((one for one in instance.core.running if one.request_id == NAME), None)
    borrower = request and instance.handovers.borrowed.borrowers.get(request.request_id)
    return borrower.away if borrower else 0


def lent(cluster: Cluster, name: str = "d") -> int:
    return len(cluster.instances[name].handovers.agent.lending)


def preemptions(cluster: Cluster) -> int:
    ended = cluster.entries[NAME].end
    assert ended is not None
    return ended.preemptions


def whole_pool(cluster: Cluster) -> Entry:
    """A request that needs a creditor's memory but for less than it lent."""
    (group,) = cluster.layout.groups
    pool_tokens = cluster.layout.num_large_pages * group.pages_per_large * group.page_tokens
    most = cluster.limits.max_model_len
    assert pool_tokens - SECTIONS * SECTION_TOKENS < most
    return Entry(prompt_of(2, most - 4), 4, "")


def end(cluster: Cluster) -> None:
    cluster.settle()
    cluster.check_ends()


class Lending(HandingOver):
    """The same schedules, with prompts that go on, so that many are lent."""

    @rule(
        family=st.integers(0, 3),
        length=st.integers(20, 60),
        max_tokens=st.integers(8, 30),
        at=st.sampled_from(NAMES),
        to=st.permutations(NAMES),
    )
    def submit_and_lend(
        self, family: int, length: int, max_tokens: int, at: str, to: list[str]
    ) -> None:
        name = f"r{self.count}"
        self.cluster.submit(name, Entry(prompt_of(family, length), max_tokens, ""), at, "")
        self.count += 1
        self.cluster.step(at)
        for dst in to:
            self.cluster.lend(name, 2, dst)

    @precondition(lambda self: self.cluster.messages)
    @rule(times=st.integers(1, 20))
    def go_on(self, times: int) -> None:
        for _ in range(times):
            turn(self.cluster)


def asking(max_tokens: int = 12, large: int = 60, mix: str = "full") -> Cluster:
    cluster = start(mix, max_tokens, large, by_queries=True)
    cluster.lend(NAME, SECTIONS, "d")
    run(cluster, lambda: away(cluster.instances["p"]) == SECTIONS)
    return cluster
