"""Ratios that cannot exceed 1: in statistics, metrics and the map, after each step of a cluster.

Requests move, are handed over, retried and preempted, pull pages, borrow memory and draft tokens.
"""

from collections import Counter
from collections.abc import Iterable

import pytest

from kvell.engine.protocol.messages import Finished
from kvell.engine.protocol.statistics import Stats
from kvell.fleet.fleet import MemberStatus
from kvell.front.request_queue import Entries
from kvell.server.map.figures import InstanceSnapshot, map_body
from kvell.server.metrics.front_metrics import ServerMetrics
from kvell.server.metrics.instance_metrics import InstanceFigures
from tests.engine.moving.handing_over import Cluster, Entry, Extras, Instance
from tests.engine.moving.machine import MIXES, NAMES, cluster_of, prompt_of

STATUS = MemberStatus("mixed-0", "mixed", "serving", 7, 0, None)


def at_most(stats: Stats) -> dict[str, tuple[float, float]]:
    """Return pairs of figures, of which the first is never above the second."""
    queries, drafts = stats.prefix_cache_queries, stats.spec_decode_draft_tokens
    pool = stats.large_pages * stats.large_page_bytes
    used = sum(group.used_pages * group.page_bytes for group in stats.groups)
    cached = sum(group.cached_pages * group.page_bytes for group in stats.groups)
    buffer = stats.buffer
    places = stats.spec_decode_accepted_by_position
    return {
        "hits": (stats.prefix_cache_hits, queries),
        "accepted drafts": (stats.spec_decode_accepted_tokens, drafts),
        "drafts": (stats.spec_decode_drafts, drafts),
        "usage": (stats.kv_cache_usage, 1.0),
        "used and cached bytes": (used + cached, pool),
        "empty large pages": (stats.empty_large_pages, stats.large_pages),
        "buffered large pages": (buffer.get("used_large_pages", 0), buffer.get("large_pages", 0)),
        **{f"accepted at {n}": (count, stats.spec_decode_drafts) for n, count in enumerate(places)},
        **{f"hits of {group.name}": (group.hit_tokens, queries) for group in stats.groups},
        **{
            f"pages of {group.name}": (group.used_pages + group.cached_pages, group.most_pages)
            for group in stats.groups
        },
    }


def check(stats: Stats) -> None:
    """Check the figures where they are made, and where operators read them."""
    for name, (part, whole) in at_most(stats).items():
        assert 0 <= part <= whole, (name, part, whole)
    shown = map_body([InstanceSnapshot(STATUS, stats, None)], Entries([], []), 0.0)
    [instance] = shown["instances"]
    for group in instance["stats"]["groups"]:
        assert group["hit_rate"] is None or 0 <= group["hit_rate"] <= 1, group
    assert instance["stats"]["hit_tokens"] <= instance["stats"]["query_tokens"]
    assert all(size is None or size >= 0 for size in instance["stats"]["bytes"].values())
    metrics = ServerMetrics("m")
    metrics.instances.instances = {"mixed-0": InstanceFigures(stats)}
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    assert min(sample.value for sample in samples if sample.name.startswith("kvell:")) >= 0
    total: Counter[str] = Counter()
    for sample in samples:
        total[sample.name] += sample.value  # type: ignore[assignment]
    sources = total["kvell:prompt_tokens_by_source_total"]
    assert sources == total["kvell:prefix_cache_queries_total"]
    cached = total["kvell:prompt_tokens_cached_by_source_total"]
    assert cached == total["kvell:prefix_cache_hits_total"]


class Checked:
    """A cluster whose figures are checked after each report of an instance.

    :ivar ends: ends of requests at instances, by reason.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.ends: list[Finished] = []
        hear = cluster.hear

        def checked(instance: Instance, events: Iterable[object]) -> None:
            self.ends += [event for event in events if isinstance(event, Finished)]
            hear(instance, events)  # type: ignore[arg-type]
            check(instance.core.stats())

        cluster.hear = checked  # type: ignore[method-assign]

    def turn(self) -> None:
        while self.cluster.messages:
            self.cluster.deliver(0)
        for name in NAMES:
            self.cluster.copy(name, 0, 99)
            self.cluster.step(name)

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()


@pytest.mark.parametrize("mix", list(MIXES))
@pytest.mark.parametrize("extras", [Extras(), Extras(buffer=6)], ids=["pool", "buffer"])
def test_ratios_hold_while_requests_move_pull_and_are_retried(mix: str, extras: Extras) -> None:
    checked = Checked(cluster_of(mix, large=24, extras=extras))
    cluster = checked.cluster
    known = Entry(prompt_of(1, 30), 5, "")
    cluster.submit("known", known, "e", "")
    cluster.settle()
    tail = [*known.prompt, *known.emitted]
    cluster.submit("pulls", Entry([*tail, 3, 2, 1], 6, ""), "p", "", pulls_from="e")
    cluster.submit("handed over", Entry([*tail, 4], 9, ""), "p", "d")
    cluster.submit("migrates", Entry(prompt_of(2, 22), 14, ""), "p", "")
    checked.turns(6)
    cluster.migrate("migrates", "d")
    checked.turns(6)
    cluster.submit("retried", Entry(prompt_of(3, 26), 20, ""), "e", "")
    checked.turns(5)
    assert cluster.entries["retried"].emitted
    cluster.crash("e")
    for number in range(6):
        prompt = [*tail, *prompt_of(4 + number, 12)]
        cluster.submit(f"hit {number}", Entry(prompt, 12, ""), "d", "")
    cluster.settle()
    cluster.check_ends()
    assert cluster.moved >= 2, "a handover and a migration"
    assert any(end.pulled_bytes for end in checked.ends)
    assert cluster.entries["retried"].attempt == 1
    groups = [group for name in NAMES for group in cluster.instances[name].core.stats().groups]
    assert any(group.hit_tokens for group in groups)


def test_ratios_hold_while_sections_are_lent() -> None:
    checked = Checked(cluster_of("full", large=60))
    checked.cluster.submit("r", Entry(prompt_of(1, 37), 20, ""), "p", "")
    checked.turns(4)
    checked.cluster.lend("r", 3, "d")
    checked.cluster.settle()
    checked.cluster.check_ends()
    assert checked.cluster.instances["p"].core.stats().sections["loans"] == 3


def test_ratios_hold_with_drafts_and_preemptions() -> None:
    checked = Checked(cluster_of("drafts", large=14))
    cluster = checked.cluster
    for number in range(4):
        cluster.submit(f"r{number}", Entry(prompt_of(number % 2, 20), 16, ""), "p", "")
    cluster.settle()
    stats = cluster.instances["p"].core.stats()
    assert stats.spec_decode_draft_tokens > 0 and stats.preemptions > 0
    assert stats.prefix_cache_hits > 0


def test_pages_that_arrive_with_a_request_are_no_hits() -> None:
    cluster = cluster_of("full")
    cluster.submit("r", Entry(prompt_of(1, 23), 9, ""), "p", "d")
    cluster.settle()
    assert cluster.moved == 1
    at_target = cluster.instances["d"].core.stats()
    assert at_target.prefix_cache_queries == 0
    assert [group.hit_tokens for group in at_target.groups] == [0] * len(at_target.groups)


def test_hits_of_groups_are_those_of_the_memory_core_while_nothing_moves() -> None:
    cluster = cluster_of("windows")
    for number, length in enumerate((30, 30, 17, 40)):
        cluster.submit(f"r{number}", Entry(prompt_of(1, length), 3, ""), "p", "")
        cluster.settle()
    core = cluster.instances["p"].core
    stats = core.stats()
    hits = tuple(group.hit_tokens for group in stats.groups)
    assert stats.preemptions == 0 and hits == core.memory.totals().group_hit_tokens
    assert any(hits)
