"""Nodes that compute attention over what they lend answer peers of other hosts, and say so."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvell.mempool.entries import BY_QUERIES, NOT_IN_PLACE, PeerLost
from kvell.mempool.transfers.actions import Grant, Revoke
from kvell.mempool.transfers.messages import Transfer
from kvell.mempool.transports.lent_attention import RightsWords
from tests.mempool.hosts import LAYOUT, PATIENCE_SECONDS, Host, Instance, Start, meet

RIGHT = 7
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


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    found = Host(tmp_path)
    yield found
    for one in list(found.running):
        found.end(one)


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
