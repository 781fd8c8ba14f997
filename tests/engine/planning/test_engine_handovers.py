"""Requests whose prompt one instance computes and another goes on with."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvell.engine.requests.limits import Limits
from kvell.memory import longest_request
from kvell.pages.layout import GroupSpec
from tests.engine.planning.handing_over import Cluster, Entry
from tests.engine.virtual_model import expected_output
from tests.pages.pools import group, pool_of

MIXES: dict[str, list[GroupSpec]] = {
    "full": [group(4, 2)],
    "windows": [group(4, 3), group(2, 5, window=9), group(4, 1, window=5)],
}
NAMES = ("p", "d", "e")


def cluster_of(mix: str = "windows", large: int = 60, seats: int = 4, batched: int = 16) -> Cluster:
    layout = pool_of(large, *MIXES[mix])
    limits = Limits(
        max_num_batched_tokens=max(batched, seats),
        max_num_seqs=seats,
        max_model_len=max(2, longest_request(layout, 60, 4)),
        vocab_size=50,
        min_chunk_tokens=4,
    )
    return Cluster(layout, limits, NAMES)


def prompt_of(family: int, length: int) -> list[int]:
    return [(family * 7 + i * i) % 50 for i in range(length)]


class HandingOver(RuleBasedStateMachine):
    """Answers are right whatever is lost, late, cancelled or dies; nothing is held at the end."""

    @initialize(
        mix=st.sampled_from(list(MIXES)),
        large=st.integers(8, 40),
        seats=st.integers(1, 4),
        batched=st.sampled_from([3, 16]),
    )
    def start(self, mix: str, large: int, seats: int, batched: int) -> None:
        self.cluster = cluster_of(mix, large, seats, batched)
        self.count = 0

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 40),
        max_tokens=st.integers(1, 12),
        ways=st.permutations(NAMES),
        salted=st.booleans(),
        moves=st.sampled_from([True, True, True, False]),
    )
    def submit(
        self,
        family: int,
        length: int,
        max_tokens: int,
        ways: list[str],
        salted: bool,
        moves: bool,
    ) -> None:
        entry = Entry(prompt_of(family, length), max_tokens, "s" if salted else "")
        self.cluster.submit(f"r{self.count}", entry, ways[0], ways[1] if moves else "")
        self.count += 1

    @rule(name=st.sampled_from(NAMES), times=st.integers(1, 4))
    def step(self, name: str, times: int) -> None:
        for _ in range(times):
            self.cluster.step(name)

    @precondition(lambda self: self.cluster.messages)
    @rule(index=st.sampled_from([0, 0, 0, 1, 3]), chance=st.integers(0, 14))
    def deliver(self, index: int, chance: int) -> None:
        self.cluster.deliver(index, loses=chance == 0)

    @rule(name=st.sampled_from(NAMES), index=st.integers(0, 3), count=st.integers(0, 9))
    def copy(self, name: str, index: int, count: int) -> None:
        self.cluster.copy(name, index, count)

    @rule(ticks=st.sampled_from([1, 1000, 400_000]))
    def pass_time(self, ticks: int) -> None:
        self.cluster.pass_time(ticks)

    @precondition(lambda self: self.count)
    @rule(pick=st.integers(0, 99))
    def cancel(self, pick: int) -> None:
        self.cluster.cancel(f"r{pick % self.count}")

    @rule(name=st.sampled_from(NAMES), chance=st.integers(0, 4))
    def crash(self, name: str, chance: int) -> None:
        if chance == 0:
            self.cluster.crash(name)

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.settle()
            self.cluster.check_ends()


SOME = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class LongHandingOver(HandingOver):
    """10,000 schedules."""


TestHandingOver = HandingOver.TestCase
TestHandingOver.settings = SOME
TestLongHandingOver = pytest.mark.long(LongHandingOver.TestCase)
TestLongHandingOver.settings = settings(SOME, max_examples=10_000)


@pytest.mark.parametrize("mix", list(MIXES))
@pytest.mark.parametrize("length", [1, 8, 23])
def test_the_prompt_is_computed_at_one_and_the_answer_at_the_other(mix: str, length: int) -> None:
    cluster = cluster_of(mix)
    entry = Entry(prompt_of(1, length), 9, "")
    cluster.submit("r", entry, "p", "d")
    cluster.settle()
    cluster.check_ends()
    assert cluster.moved == 1
    assert entry.emitted == expected_output(entry.prompt, 9)
    assert cluster.instances["p"].model.tokens_computed == length
    assert cluster.instances["d"].model.tokens_computed == 8


def test_the_next_turn_crosses_without_what_is_there() -> None:
    cluster = cluster_of()
    first = Entry(prompt_of(1, 20), 6, "")
    cluster.submit("one", first, "p", "d")
    cluster.settle()
    second = Entry([*first.prompt, *first.emitted, 1, 2, 3], 4, "")
    cluster.submit("two", second, "p", "d")
    for _ in range(40):
        while cluster.messages:
            cluster.deliver(0)
        rows = [len(copying.rows) for copying in cluster.instances["d"].copying.values()]
        if rows:
            assert rows[0] <= 7  # of 15
        for name in NAMES:
            cluster.copy(name, 0, 99)
            cluster.step(name)
    cluster.settle()
    cluster.check_ends()
    assert cluster.moved == 2


def test_where_there_is_no_room_the_request_stays() -> None:
    cluster = cluster_of(large=20)
    blocker = Entry(prompt_of(2, 40), 15, "")
    cluster.submit("blocker", blocker, "d", "")
    for _ in range(4):
        cluster.step("d")
    entry = Entry(prompt_of(1, 40), 9, "")
    cluster.submit("r", entry, "p", "d")
    cluster.settle()
    cluster.check_ends()
    assert entry.at in ("p", "d")
    assert entry.emitted == expected_output(entry.prompt, 9)


@pytest.mark.parametrize("batched", range(1, 9))
def test_a_request_moves_only_once_all_that_was_announced_is_computed(batched: int) -> None:
    """With an earlier attempt's output, a chunk may end a token before the last known one."""
    cluster = cluster_of(seats=1, batched=batched)
    entry = Entry(prompt_of(1, 12), 9, "", emitted=expected_output(prompt_of(1, 12), 5))
    cluster.submit("r", entry, "p", "d")
    cluster.settle()
    cluster.check_ends()
    assert cluster.moved == 1


@pytest.mark.parametrize("after", range(0, 12, 2))
@pytest.mark.parametrize("dies", ["p", "d"])
def test_a_death_at_any_moment_loses_nothing(dies: str, after: int) -> None:
    cluster = cluster_of()
    entry = Entry(prompt_of(1, 30), 9, "")
    cluster.submit("r", entry, "p", "d")
    for moment in range(after):
        if cluster.messages:
            cluster.deliver(0)
        for name in NAMES:
            cluster.copy(name, 0, 2 + moment % 2)
            cluster.step(name)
    cluster.crash(dies)
    cluster.settle()
    cluster.check_ends()
    assert entry.end is not None and entry.end.reason == "length"


def test_no_step_is_planned_while_there_is_nothing_to_compute() -> None:
    """A request that is announced, or moving, needs no steps; nor does one that comes."""
    cluster = cluster_of()
    cluster.submit("r", Entry(prompt_of(1, 10), 5, ""), "p", "d")
    assert not cluster.works("p")  # announced
    cluster.deliver(0)
    assert not cluster.works("d")  # it comes
    cluster.deliver(0)
    assert cluster.works("p")
    cluster.step("p")
    assert not cluster.works("p")  # it moves
    cluster.deliver(0)
    cluster.copy("d", 0, 99)
    assert cluster.works("d")
    cluster.settle()
    cluster.check_ends()


def test_what_cannot_move_is_served_where_it_is() -> None:
    cluster = cluster_of()
    entry = Entry(prompt_of(1, 12), 3, "")
    cluster.submit("short", Entry(prompt_of(1, 12), 1, ""), "p", "d")  # ends with its first token
    cluster.submit("r", entry, "p", "nobody")
    cluster.pass_time(1_000_000)
    cluster.settle()
    cluster.check_ends()
    assert cluster.moved == 0
