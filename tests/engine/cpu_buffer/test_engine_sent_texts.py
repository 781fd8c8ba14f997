"""Texts that others read from both tiers: the right pages, unchanged until they have been read."""

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kvell.mempool.holds import Holds
from kvell.mempool.owners import Owner
from kvell.mempool.tiers.buffered import needed_pages
from kvell.mempool.tiers.sent import SentTexts
from kvell.mempool.transfers.copies import whole
from tests.depth import machine, search_until_all
from tests.engine.cpu_buffer.two_tiers import Content, TwoTiers, texts

BEYOND = 50
"""The first large page of the buffer: it need not follow the pool's last one."""


@dataclass
class Sent:
    """A text that is read, and what its pages in each tier held when it was offered."""

    owner: Owner
    in_pool: dict[tuple[int, int], Content]
    in_buffer: dict[tuple[int, int], Content]


class SentFromTwoTiers(TwoTiers):
    """Others read texts while requests come and go, and either tier is short of memory."""

    sorts: ClassVar[Counter[str]] = Counter()

    def sender(self) -> SentTexts:
        if not hasattr(self, "sent"):
            self.holds = Holds(self.core)
            self.sent = SentTexts(self.core, self.holds, self.prefixes.pages, BEYOND)
            self.sending: list[Sent] = []
            self.numbers = itertools.count()
        return self.sent

    @rule(text=texts, more=st.integers(0, 3))
    def send(self, text: list[int], more: int) -> None:
        sender, wanted = self.sender(), [*text, *[60] * more]
        found, all_of_it = self.check_known(wanted), [*wanted, 1 << 20]
        owner = Owner("departure", "a", 1, next(self.numbers))
        hit = self.holds.hold_text(owner, 1, whole(wanted)).hit_tokens
        sender.extend(owner)
        length = self.holds[owner].hit_tokens
        assert max(hit, self.longest(all_of_it, set())) <= length
        assert length <= max(hit, self.longest(all_of_it, found))
        sent = Sent(owner, {}, {})
        self.sending.append(sent)
        if length > hit:
            self.note_pages(sent, wanted, length)
            assert sent.in_buffer, "the pool alone reaches as far"
            self.sorts["both" if sent.in_pool else "buffer"] += 1

    def note_pages(self, sent: Sent, text: list[int], length: int) -> None:
        places = self.sent.places(sent.owner)
        needed = {
            (index, at): self.content(text, index, place)
            for index, spec in enumerate(self.groups)
            for at, place in needed_pages(spec, length)
        }
        assert places.keys() == needed.keys()
        for (index, at), page in places.items():
            held = page - BEYOND * self.groups[index].pages_per_large
            if held < 0:
                sent.in_pool[index, page] = needed[index, at]
            else:
                sent.in_buffer[index, held] = needed[index, at]

    @precondition(lambda self: bool(getattr(self, "sending", [])))
    @rule(index=st.integers(0, 9))
    def read(self, index: int) -> None:
        """One of them has been read, or its reader has died."""
        sent = self.sending.pop(index % len(self.sending))
        self.holds.release(sent.owner)
        self.sent.release(sent.owner)
        self.sent.release(sent.owner)

    @rule()
    def drop(self) -> None:
        """All prefixes go from the buffer, and what they leave is used again."""
        if any(sent.in_buffer for sent in getattr(self, "sending", [])):
            self.sorts["dropped"] += 1
        self.prefixes.let_go()

    @invariant()
    def unchanged(self) -> None:
        for sent in getattr(self, "sending", []):
            for at, content in sent.in_pool.items():
                assert self.in_pool[at] == content
            for at, content in sent.in_buffer.items():
                assert self.in_buffer[at] == content

    def teardown(self) -> None:
        while getattr(self, "sending", []):
            self.read(0)
        if hasattr(self, "core"):
            self.buffer.settle()
        super().teardown()


SORTS = "buffer", "both", "dropped"
SOME = machine(30, weight=0.6)


@pytest.mark.hypothesis
def test_what_is_read_stays_as_it_is() -> None:
    """A deep search goes on until texts were read from each tier, and dropped meanwhile."""
    sorts = SentFromTwoTiers.sorts
    sorts.clear()
    search_until_all(SentFromTwoTiers, SOME, lambda: [sort for sort in SORTS if not sorts[sort]])
