"""Reports of copied bytes: ends of requests and statistics name all pages that cross, and once."""

from collections.abc import Callable, Sequence

import pytest

from kvell.engine.protocol.messages import Event, Finished
from kvell.mempool.transfers.actions import Action, Pull
from tests.engine.lending.borrowing import NAME, away, end, run, start
from tests.engine.moving.handing_over import Cluster, Entry, Instance
from tests.engine.moving.machine import MIXES, cluster_of, prompt_of, turn


class Watched:
    """A cluster's copied pages in bytes, and the ends that its instances report."""

    def __init__(self, cluster: Cluster) -> None:
        self.crossed = 0
        self.ends: list[Finished] = []
        self._strides = [group.page_stride_bytes for group in cluster.layout.groups]
        self._act: Callable[[Instance, Sequence[Action]], None] = cluster.act
        self._hear: Callable[[Instance, Sequence[Event]], None] = cluster.hear
        cluster.act = self.act  # type: ignore[method-assign]
        cluster.hear = self.hear  # type: ignore[method-assign]

    def act(self, instance: Instance, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Pull):
                self.crossed += sum(self._strides[group] for group in action.rows[:, 0].tolist())
        self._act(instance, actions)

    def hear(self, instance: Instance, events: Sequence[Event]) -> None:
        self.ends += [event for event in events if isinstance(event, Finished)]
        self._hear(instance, events)

    @property
    def moved(self) -> int:
        return sum(event.moved_bytes for event in self.ends)

    @property
    def pulled(self) -> int:
        return sum(event.pulled_bytes for event in self.ends)


@pytest.mark.parametrize("mix", list(MIXES))
@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_request_that_leaves_reports_all_its_copied_pages(mix: str, at: int) -> None:
    """A migration copies most of them before the request leaves the steps."""
    cluster = cluster_of(mix)
    watched = Watched(cluster)
    cluster.submit("handed over", Entry(prompt_of(1, 23), 9, ""), "p", "d")
    cluster.submit("migrates", Entry(prompt_of(2, 22), 14, ""), "p", "")
    for _ in range(at):
        turn(cluster)
    cluster.migrate("migrates", "d")
    cluster.settle()
    cluster.check_ends()
    assert cluster.moved == 2
    assert [event.moved_bytes > 0 for event in watched.ends] == [
        event.reason == "moved" for event in watched.ends
    ]
    assert (watched.moved, watched.pulled) == (watched.crossed, 0)


@pytest.mark.parametrize("goes_to", ["", "d"])
def test_pulled_pages_are_reported_once_by_the_instance_that_pulled(goes_to: str) -> None:
    cluster = cluster_of()
    known = Entry(prompt_of(1, 30), 5, "")
    cluster.submit("known", known, "e", "")
    cluster.settle()
    watched = Watched(cluster)
    entry = Entry([*known.prompt, *known.emitted, 3, 2, 1], 4, "")
    cluster.submit("r", entry, "p", goes_to, pulls_from="e")
    cluster.settle()
    assert [event.pulled_bytes > 0 for event in watched.ends] == (
        [True, False][: 1 + (goes_to > "")]
    )
    assert watched.moved + watched.pulled == watched.crossed
    assert (watched.moved > 0) == (goes_to > "")


def test_a_request_that_finds_no_room_elsewhere_reports_no_bytes() -> None:
    cluster = cluster_of("full", large=10)
    watched = Watched(cluster)
    cluster.submit("other", Entry(prompt_of(2, 50), 9, ""), "d", "")
    turn(cluster)
    cluster.submit("r", Entry(prompt_of(1, 50), 4, ""), "p", "d")
    cluster.settle()
    cluster.check_ends()
    assert cluster.moved == watched.moved == 0


@pytest.mark.parametrize("count", [1, 3])
def test_loans_are_counted_with_their_bytes_and_stay_counted(count: int) -> None:
    cluster = start()
    debtor, creditor = cluster.instances["p"], cluster.instances["d"]
    watched = Watched(cluster)
    cluster.lend(NAME, count, "d")
    run(cluster, lambda: away(debtor) == count)
    end(cluster)
    sections = debtor.core.stats().sections
    assert (sections["borrowed"], sections["loans"]) == (0, count)
    assert sections["loaned_bytes"] == watched.crossed > 0
    assert creditor.core.stats().sections["loans"] == 0, "the debtor counts"


def test_an_instance_alone_counts_no_loans() -> None:
    sections = cluster_of("full").instances["e"].core.stats().sections
    assert sections["loans"] == sections["loaned_bytes"] == 0
    assert not any(sections.values())
