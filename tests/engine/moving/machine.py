"""Random requests that move between instances."""

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvell.engine.core.lateness import Lateness
from kvell.engine.requests.limits import Limits
from kvell.memory import longest_request
from kvell.mempool.rendezvous import PD_CACHINGS, PdCaching
from kvell.mempool.transfers.methods import ALWAYS, StreamCosts
from kvell.pages.layout import GroupSpec
from tests.depth import machine
from tests.engine.moving.handing_over import PLAIN, Cluster, Entry, Extras, need_of
from tests.engine.planning.shared_traffic import longest
from tests.pages.pools import group, pool_of


def layered(page_tokens: int, pages_per_large: int, window: int = 0) -> GroupSpec:
    return replace(group(page_tokens, pages_per_large, window), layers=(0, 1))


MIXES: dict[str, list[GroupSpec]] = {
    "full": [layered(4, 2)],
    "windows": [layered(4, 3), layered(2, 5, window=9), layered(4, 1, window=5)],
}

ALL_MIXES = MIXES | {"drafts": [layered(4, 2), replace(layered(4, 3), is_draft=True)]}

NAMES = ("p", "d", "e")

MORE_LARGE = 8


"""Large pages for activations, where they share the pool."""


def cluster_of(
    mix: str = "windows",
    large: int = 60,
    seats: int = 4,
    batched: int = 16,
    pd_caching: PdCaching = 2,
    streams: StreamCosts | None = None,
    *,
    by_queries: bool = False,
    depth: int = 0,
    extras: Extras = PLAIN,
) -> Cluster:
    layout = pool_of(large + MORE_LARGE * (extras.chunk_parts > 0), *ALL_MIXES[mix])
    model_len = longest_request(layout, 60, 4)
    if extras.chunk_parts:
        model_len = min(
            model_len, longest(layout, need_of(extras, layout), extras.chunk_bytes(layout))
        )
    limits = Limits(
        max_num_batched_tokens=max(batched, seats),
        max_num_seqs=seats,
        max_model_len=max(2, model_len),
        vocab_size=50,
        min_chunk_tokens=4,
        num_speculative_tokens=3 if mix == "drafts" else 0,
        has_drafter=mix == "drafts",
        depth=depth,
    )
    return Cluster(
        *(layout, limits, NAMES, pd_caching),
        streams=streams,
        by_queries=by_queries,
        extras=extras,
    )


def prompt_of(family: int, length: int) -> list[int]:
    return [(family * 7 + i * i) % 50 for i in range(length)]


class HandingOver(RuleBasedStateMachine):
    """Answers are right whatever is lost, late, cancelled or dies; nothing is held at the end."""

    @initialize(
        mix=st.sampled_from(list(ALL_MIXES)),
        large=st.integers(8, 40),
        seats=st.integers(1, 4),
        batched=st.sampled_from([3, 16]),
        pd_caching=st.sampled_from(PD_CACHINGS),
        streams=st.sampled_from([None, ALWAYS]),
        by_queries=st.booleans(),
        depth=st.integers(0, 1),
        extras=st.builds(
            Extras,
            buffer=st.sampled_from([0, 0, 3, 20]),
            ahead=st.sampled_from([0, 4, 20]),
            chunk_parts=st.sampled_from([0, 2, 4, 6]),
            seed=st.integers(0, 5),
        ),
    )
    def start(
        self,
        mix: str,
        large: int,
        seats: int,
        batched: int,
        pd_caching: PdCaching,
        streams: StreamCosts | None,
        by_queries: bool,
        depth: int,
        extras: Extras,
    ) -> None:
        self.cluster = cluster_of(
            *(mix, large, seats, batched, pd_caching, streams),
            by_queries=by_queries,
            depth=depth,
            extras=extras,
        )
        self.count = 0

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 40),
        max_tokens=st.integers(1, 12),
        ways=st.permutations(NAMES),
        salted=st.booleans(),
        moves=st.sampled_from([True, True, True, False]),
        pulls=st.sampled_from([0, 0, 1, 2]),
    )
    def submit(
        self,
        family: int,
        length: int,
        max_tokens: int,
        ways: list[str],
        salted: bool,
        moves: bool,
        pulls: int,
    ) -> None:
        entry = Entry(prompt_of(family, length), max_tokens, "s" if salted else "")
        goes_to, pulls_from = ways[1] if moves else "", ways[pulls] if pulls else ""
        self.cluster.submit(f"r{self.count}", entry, ways[0], goes_to, pulls_from)
        self.count += 1

    @precondition(lambda self: self.count)
    @rule(pick=st.integers(0, 99), to=st.sampled_from(NAMES))
    def migrate(self, pick: int, to: str) -> None:
        self.cluster.migrate(f"r{pick % self.count}", to)

    @precondition(lambda self: self.count)
    @rule(pick=st.integers(0, 99), num_blocks=st.integers(1, 3), to=st.sampled_from(NAMES))
    def lend(self, pick: int, num_blocks: int, to: str) -> None:
        self.cluster.lend(f"r{pick % self.count}", num_blocks, to)

    @rule(
        name=st.sampled_from(NAMES),
        times=st.integers(1, 4),
        ticks=st.sampled_from([0, 0, 0, 3_000, 400_000]),
    )
    def step(self, name: str, times: int, ticks: int) -> None:
        for _ in range(times):
            self.cluster.step(name, ticks)

    @precondition(lambda self: self.cluster.messages)
    @rule(index=st.sampled_from([0, 0, 0, 1, 3]), chance=st.integers(0, 14))
    def deliver(self, index: int, chance: int) -> None:
        self.cluster.deliver(index, loses=chance == 0)

    @rule(name=st.sampled_from(NAMES), index=st.integers(0, 3), count=st.integers(0, 9))
    def copy(self, name: str, index: int, count: int) -> None:
        self.cluster.copy(name, index, count)

    @rule(name=st.sampled_from(NAMES), ttft=st.booleans(), tpot=st.booleans())
    def be_late(self, name: str, ttft: bool, tpot: bool) -> None:
        self.cluster.be_late(name, Lateness(ttft_late=ttft, tpot_late=tpot))

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


SOME = machine(40, weight=0.5)


def turn(cluster: Cluster, *, steps: str = "pde") -> None:
    while cluster.messages:
        cluster.deliver(0)
    for name in NAMES:
        cluster.copy(name, 0, 99)
    for name in steps:
        cluster.step(name)
