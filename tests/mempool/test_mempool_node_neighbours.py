"""Nodes of one host see their peers' pools; those of other hosts ask for attention."""

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvell.errors import TryLater
from kvell.mempool.entries import BY_QUERIES, NOT_IN_PLACE, PeerLost, PeerMapped
from kvell.mempool.transfers.actions import Grant, Revoke
from kvell.mempool.transfers.messages import Transfer
from kvell.mempool.transports.lent_attention import RightsWords
from tests.mempool.hosts import GROUP, LAYOUT, PATIENCE_SECONDS, Host, Instance, Start, meet

RIGHT = 7


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    found = Host(tmp_path)
    yield found
    for one in list(found.running):
        found.end(one)


def test_pages_of_peers_are_read_by_numbers_behind_ones_own(host: Host) -> None:
    a, b, c = (host.start(Start(name)) for name in "abc")
    for other, byte in ((b, 1), (c, 2)):
        meet(a, other)
        told = a.mapped()
        assert told[:2] == ("bc"[byte - 1], 1)
        first_page = told.first_large * GROUP.pages_per_large
        assert first_page >= LAYOUT.num_large_pages * GROUP.pages_per_large
        for page in (0, 5):
            other.page(page)[:] = 10 * byte + page
            assert (a.page(first_page + page) == 10 * byte + page).all()
    assert b.mapped().peer == c.mapped().peer == "a"


def test_a_right_stands_as_long_as_its_owner_says(host: Host) -> None:
    a, b = host.start(Start("a")), host.start(Start("b"))
    meet(a, b)
    a.mapped()
    assert not a.node.creditors.stands("b", 1, RIGHT)
    b.node.rights.grant(RIGHT, "a", [])
    assert a.node.creditors.stands("b", 1, RIGHT)
    assert not a.node.creditors.stands("b", 2, RIGHT) and not a.node.creditors.stands("c", 1, RIGHT)
    assert not a.node.creditors.stands("b", 1, 0) and not a.node.creditors.stands("b", 1, RIGHT + 1)
    b.node.rights.revoke(RIGHT)
    assert not a.node.creditors.stands("b", 1, RIGHT)


def test_both_sides_connect_at_once_and_are_mapped_once(host: Host) -> None:
    a, b = host.start(Start("a", places=1)), host.start(Start("b", places=1))
    meet(a, b)
    meet(b, a)
    assert a.mapped().first_large != NOT_IN_PLACE
    assert b.mapped().first_large != NOT_IN_PLACE
    assert a.node.peers() == ["b"] and a.entries.empty() and b.entries.empty()


def test_one_that_died_stays_readable_until_it_is_taken_away(host: Host) -> None:
    """A step may be reading it; its rights are gone, so nothing that was read counts."""
    a, b = host.start(Start("a", places=1)), host.start(Start("b"))
    meet(a, b)
    first = a.mapped().first_large
    b.mapped()  # both have met: what hangs up now is seen
    b.page(0)[:] = 5
    b.node.rights.grant(RIGHT, "a", [])
    host.end(b)
    assert a.next() == PeerLost("b", 1)
    assert (a.page(first * GROUP.pages_per_large) == 5).all()
    assert not a.node.creditors.stands("b", 1, RIGHT)
    again = host.start(Start("b", incarnation=2))
    meet(a, again)
    assert a.mapped() == PeerMapped("b", 2, NOT_IN_PLACE), "its place is taken until then"
    a.node.creditors.take_away("b", 1)
    a.node.creditors.take_away("b", 1)  # as often as it is lost
    third = host.start(Start("c"))
    meet(a, third)
    assert a.mapped() == PeerMapped("c", 1, first)


def test_an_earlier_start_that_greets_late_replaces_no_later_one(host: Host) -> None:
    a, late, b = (host.start(one) for one in (Start("a"), Start("b", 1), Start("b", 2)))
    meet(a, b)
    assert a.mapped()[:2] == ("b", 2)
    with pytest.raises(TryLater, match="has restarted since"):
        meet(a, late)
    meet(late, a)  # and from there
    host.end(late)
    host.end(b)
    assert a.next() == PeerLost("b", 2)


def test_one_that_is_met_again_before_its_loss_is_taken_in_keeps_its_new_place(host: Host) -> None:
    """A connection broke and another was made, both while a step was computed."""
    a, b = host.start(Start("a", places=2)), host.start(Start("b"))
    b.node.rights.grant(RIGHT, "a", [])
    b.page(3)[:] = 5
    firsts = []
    for _ in range(2):
        meet(a, b)
        firsts.append(a.mapped().first_large)
        b.mapped()
        if len(firsts) == 1:
            a.node.ask(a.node.hang_up)
            assert a.next() == PeerLost("b", 1) and b.next() == PeerLost("a", 1)
    assert len({*firsts}) == 2 and NOT_IN_PLACE not in firsts
    assert a.node.creditors.stands("b", 1, RIGHT)
    a.node.creditors.take_away("b", 1)
    assert (a.page(firsts[1] * GROUP.pages_per_large + 3) == 5).all()
    assert a.node.creditors.stands("b", 1, RIGHT)
    meet(a, host.start(Start("c")))
    assert a.mapped() == PeerMapped("c", 1, firsts[0])


@pytest.mark.parametrize("why", ["another layout", "another host", "no place"])
def test_what_cannot_be_read_in_place(host: Host, why: str) -> None:
    far = why == "another host"
    a = host.start(Start("a", places=0 if why == "no place" else 4), elsewhere=far)
    b = host.start(
        Start("b", fingerprint="other" if why == "another layout" else "print"), elsewhere=far
    )
    meet(a, b)
    assert a.node.peers() == ["b"]
    if why == "another layout":
        assert a.entries.empty()
    else:
        assert a.mapped() == PeerMapped("b", 1, NOT_IN_PLACE)
    b.node.rights.grant(RIGHT, "a", [])
    assert not a.node.creditors.stands("b", 1, RIGHT) or why == "no place"


def test_descriptors_are_given_back(host: Host) -> None:
    a = host.start(Start("a"))
    open_files = []
    for incarnation in range(1, 6):
        b = host.start(Start("b", incarnation))
        meet(a, b)
        a.mapped()
        b.mapped()
        host.end(b)
        assert a.next() == PeerLost("b", incarnation)
        a.node.creditors.take_away("b", incarnation)
        del b
        gc.collect()
        open_files.append(len(list(Path("/proc/self/fd").iterdir())))
    assert open_files[1:] == open_files[:1] * 4


PAGES = np.array([[0, 3], [0, 4]], "<i4").tobytes()


class Told:
    """What computes attention writes down what it is told, and answers with it."""

    def __init__(self, words: RightsWords) -> None:
        self.words: RightsWords | None = words
        self.lent: dict[int, tuple[str, Sequence[Sequence[int]]]] = {}
        self.stood_at_end: list[bool] = []

    def lend(self, right: int, debtor: str, pages: Sequence[Sequence[int]]) -> None:
        self.lent[right] = debtor, pages

    def end(self, right: int) -> None:
        if self.words is not None and right in self.lent:
            del self.lent[right]
            self.stood_at_end.append(bool(self.words[right % len(self.words)]))

    def answer(self, debtor: str, query: bytes) -> bytes:
        return f"{debtor} asked ".encode() + query

    def close(self) -> None:
        self.words = None


def lending(host: Host, name: str, *, incarnation: int = 1) -> tuple[Instance, list[Told]]:
    made: list[Told] = []

    def lends(words: RightsWords) -> Told:
        made.append(Told(words))
        return made[0]

    start = Start(name, incarnation, lends=lends)
    return host.start(start, elsewhere=True), made


def grant(receiver: str, *, lends: bool) -> Grant:
    return Grant(Transfer("b", 1, RIGHT), receiver, PAGES, lends)


def test_peers_that_answer_are_met_as_such_and_asked(host: Host) -> None:
    (a, _), (b, _) = lending(host, "a"), lending(host, "b")
    meet(a, b)
    assert a.mapped() == ("b", 1, BY_QUERIES) and b.mapped() == ("a", 1, BY_QUERIES)
    line = a.node.creditors.partials("b", 1)
    assert line is not None and a.node.creditors.partials("b", 2) is None
    assert line.post(b"something")
    assert line.take(PATIENCE_SECONDS) == b"a asked something"
    assert not a.node.creditors.stands("b", 1, RIGHT)


def test_one_that_answers_nobody_asks_nobody(host: Host) -> None:
    (a, _), b = lending(host, "a"), host.start(Start("b"), elsewhere=True)
    meet(a, b)
    assert b.mapped() == ("a", 1, NOT_IN_PLACE)
    assert b.node.creditors.partials("a", 1) is None
    assert a.mapped().first_large == BY_QUERIES
    line = a.node.creditors.partials("b", 1)
    assert line is not None and line.post(b"a") is not None
    assert line.take(PATIENCE_SECONDS) is None, "it hangs up on another purpose"


def test_on_one_host_pages_are_read_in_place(host: Host, tmp_path: Path) -> None:
    a = host.start(Start("a", lends=Told))
    b = host.start(Start("b", lends=Told))
    meet(a, b)
    assert a.mapped().first_large * LAYOUT.large_page_bytes >= LAYOUT.pool_bytes
    assert a.node.creditors.partials("b", 1) is None


def test_only_what_is_lent_can_be_asked_for(host: Host) -> None:
    b, made = lending(host, "b")
    (told,) = made
    b.node.grant_right(grant("a", lends=False))
    assert told.lent == {}
    b.node.revoke(Revoke(Transfer("b", 1, RIGHT)))
    b.node.grant_right(grant("a", lends=True))
    assert told.lent == {RIGHT: ("a", [[3, 4], *([] for _ in LAYOUT.groups[1:])])}
    b.node.revoke(Revoke(Transfer("b", 1, RIGHT)))
    assert told.lent == {} and told.stood_at_end == [False], "the word goes first"


def test_what_is_lent_may_be_copied_by_another_creditor(host: Host) -> None:
    """And what is sent to one instance by that instance alone."""
    b, _ = lending(host, "b")
    extent = [(3 * LAYOUT.groups[0].page_stride_bytes, 8)]
    b.node.grant_right(grant("a", lends=False))
    assert b.node.rights.covers(RIGHT, "a", extent)
    assert not b.node.rights.covers(RIGHT, "c", extent)
    b.node.revoke(Revoke(Transfer("b", 1, RIGHT)))
    b.node.grant_right(grant("a", lends=True))
    assert b.node.rights.covers(RIGHT, "c", extent)
    beyond = [(0, 8)]
    assert not b.node.rights.covers(RIGHT, "c", beyond)


def test_a_creditor_that_is_gone_is_asked_no_more(host: Host) -> None:
    (a, _), (b, _) = lending(host, "a"), lending(host, "b")
    meet(a, b)
    a.mapped()
    line = a.node.creditors.partials("b", 1)
    assert line is not None and line.post(b"x") and line.take(PATIENCE_SECONDS)
    host.end(b)
    lost = a.next()
    assert isinstance(lost, PeerLost) and lost.peer == "b"
    assert line.is_closed and not line.post(b"x")
    a.node.creditors.take_away("b", 1)
    assert a.node.creditors.partials("b", 1) is None


def test_one_that_is_met_again_before_its_loss_is_taken_in_is_asked(host: Host) -> None:
    (a, _), (b, _) = lending(host, "a"), lending(host, "b")
    meet(a, b)
    a.mapped()
    host.end(b)
    assert isinstance(a.next(), PeerLost)
    again, _ = lending(host, "b")
    meet(a, again)
    a.mapped()
    a.node.creditors.take_away("b", 1)
    line = a.node.creditors.partials("b", 1)
    assert line is not None and line.post(b"x")
    assert line.take(PATIENCE_SECONDS) == b"a asked x"
