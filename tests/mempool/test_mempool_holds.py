"""Holds beside requests that come, grow and go: expiry, crashes, arrivals, compaction."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvell.memory import GroupKind, HoldingCore, Images, audit, create_core, facts_of
from kvell.mempool.holds import Holds
from kvell.mempool.owners import Owner
from tests.depth import machine
from tests.mempool.agent_audit import audit_holds
from tests.oracle.index.seen import cuts_image
from tests.pages.pools import group, images, pool_of, state

LAYOUTS = {
    "full": [group(4, 2)],
    "window": [group(4, 2), group(2, 3, window=7)],
    "state": [group(4, 2), state(2, 3)],
    "cross": [group(4, 2), images(GroupKind.CROSS, 4, 2)],
    "vision": [group(4, 2), images(GroupKind.VISION, 4, 3)],
    "in pages": [replace(group(4, 2), holds_embeddings=True)],
}
PICTURED = ("cross", "vision", "in pages")
texts = st.builds(
    lambda start, count: [start, *range(10, 10 + count)], st.integers(0, 2), st.integers(0, 40)
)


def ints(*values: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
    return np.asarray(values, np.int32)


class HoldsMachine(RuleBasedStateMachine):
    """Every answer that a model can predict is compared with it."""

    @initialize(kind=st.sampled_from(list(LAYOUTS)), large=st.integers(4, 30))
    def start(self, kind: str, large: int) -> None:
        self.core: HoldingCore = create_core(pool_of(large, *LAYOUTS[kind]))
        self.holds = Holds(self.core)
        self.step, self.now, self.kind = 0, 0, kind
        self.numbers = itertools.count()
        self.deadlines: dict[Owner, int] = {}
        self.receiving: dict[Owner, int] = {}
        self.running: dict[int, list[int]] = {}

    def owner(self, instance: str, kind: Any = "arrival") -> Owner:
        return Owner(kind, instance, 1 + self.now % 2, next(self.numbers))

    def pick(self, index: int) -> Owner:
        return sorted(self.deadlines)[index % len(self.deadlines)]

    def forget(self, owners: list[Owner]) -> None:
        for owner in owners:
            del self.deadlines[owner]
            self.receiving.pop(owner, None)

    def shown(self, text: list[int]) -> Images | None:
        """Where images are in a text: of five tokens each, behind its first ones."""
        starts = range(1, len(text) - 5, 9) if self.kind in PICTURED else ()
        rows = [[start, 5, 5] for start in starts]
        return np.asarray(rows, np.int32) if rows else None

    @rule(text=texts, instance=st.sampled_from("ab"), ticks=st.integers(1, 9))
    def hold_text(self, text: list[int], instance: str, ticks: int) -> None:
        pictures = self.shown(text)
        owner, hit = self.owner(instance), self.core.peek(ints(*text), "", images=pictures)
        hold = self.holds.hold_text(owner, self.now + ticks, ints(*text), images=pictures)
        assert hold.hit_tokens == hit
        self.deadlines[owner] = self.now + ticks
        with pytest.raises(ValueError, match="already"):
            self.holds.hold_text(owner, self.now, ints(1))

    @rule(count=st.integers(0, 9), instance=st.sampled_from("ab"), ticks=st.integers(1, 9))
    def hold_pages(self, count: int, instance: str, ticks: int) -> None:
        owner, groups = self.owner(instance, "alloc"), self.core.layout.groups
        hold = self.holds.hold_pages(owner, self.now + ticks, ints(*[count] * len(groups)))
        if hold is not None:
            self.deadlines[owner] = self.now + ticks
            assert len(self.holds.pages(owner)) == count * len(groups)

    @precondition(lambda self: any(o.kind == "arrival" for o in self.deadlines))
    @rule(index=st.integers(0, 99), part=st.integers(1, 3))
    def receive(self, index: int, part: int) -> None:
        fresh = [o for o in sorted(self.deadlines) if o.kind == "arrival"]
        owner = fresh[index % len(fresh)]
        if owner in self.receiving:
            return
        hold = self.holds[owner]
        computed = hold.hit_tokens + (len(hold.tokens) - hold.hit_tokens) * part // 3
        pictures = self.shown(hold.tokens.tolist())
        if cuts_image(facts_of(len(hold.tokens), None, pictures), computed):
            with pytest.raises(ValueError, match="cannot receive"):
                self.holds.receive(owner, computed)
            return
        # A half-full page is not among them: it comes whole, and may come where it was.
        before = {tuple(row) for row in self.core.held_pages(hold.handle)[:, 1:].tolist()}
        rows = self.holds.receive(owner, computed)
        if rows is None:
            self.forget([owner])
            return
        self.receiving[owner] = computed
        assert not before & {tuple(row) for row in rows.tolist()}

    @precondition(lambda self: self.receiving)
    @rule(index=st.integers(0, 99))
    def insert(self, index: int) -> None:
        owner = sorted(self.receiving)[index % len(self.receiving)]
        tokens, computed = self.holds[owner].tokens, self.receiving[owner]
        self.holds.insert(owner, computed)
        self.forget([owner])
        told = self.shown(tokens.tolist())
        whole = None if told is None else told[told[:, 0] + told[:, 1] <= computed]
        asked = np.append(tokens[:computed], ints(999))
        assert self.core.peek(asked, "", images=whole) == computed

    @precondition(lambda self: self.receiving)
    @rule(index=st.integers(0, 99))
    def claim(self, index: int) -> None:
        owner = sorted(self.receiving)[index % len(self.receiving)]
        tokens, computed = self.holds[owner].tokens, self.receiving[owner]
        if computed == len(tokens):
            return
        handle = self.holds.claim(owner)
        self.core.claim(handle, len(tokens))
        self.forget([owner])
        self.running[handle] = [computed, len(tokens)]

    @precondition(lambda self: self.deadlines)
    @rule(index=st.integers(0, 99))
    def release(self, index: int) -> None:
        owner = self.pick(index)
        assert self.holds.release(owner)
        assert not self.holds.release(owner)
        self.forget([owner])

    @rule(ticks=st.integers(0, 4))
    def expire(self, ticks: int) -> None:
        """An idle instance does this too: no step is needed."""
        self.now += ticks
        over = [owner for owner, deadline in self.deadlines.items() if deadline <= self.now]
        assert sorted(self.holds.release_where(lambda hold: hold.deadline <= self.now)) == sorted(
            over
        )
        self.forget(over)

    @rule(instance=st.sampled_from("ab"), incarnation=st.integers(1, 2))
    def crash(self, instance: str, incarnation: int) -> None:
        def is_its(owner: Owner) -> bool:
            return owner.instance == instance and owner.incarnation <= incarnation

        gone = [owner for owner in self.deadlines if is_its(owner)]
        assert sorted(self.holds.release_where(lambda hold: is_its(hold.owner))) == sorted(gone)
        self.forget(gone)

    @rule(text=texts, reuse=st.booleans())
    def run(self, text: list[int], reuse: bool) -> None:
        """A request beside them; alone, it may evict all that nobody holds."""
        handle = self.core.open(ints(*text), "", reuse=reuse, images=self.shown(text))
        self.core.claim(handle, len(text))
        self.running[handle] = [self.core.hit_tokens(handle), len(text)]

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 99), count=st.integers(1, 20))
    def grow(self, index: int, count: int) -> None:
        handle = sorted(self.running)[index % len(self.running)]
        computed, known = self.running[handle]
        until = self.core.largest(handle, min(known, computed + count))
        if until == computed:
            return
        self.core.grow(ints(handle), ints(until))
        self.core.advance(ints(handle), ints(until))
        self.running[handle][0] = until

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 99))
    def close(self, index: int) -> None:
        handle = sorted(self.running)[index % len(self.running)]
        self.core.close(handle)
        del self.running[handle]

    @rule(most=st.integers(1, 3))
    def compact(self, most: int) -> None:
        before = {owner: self.holds.pages(owner).tolist() for owner in self.deadlines}
        self.step += 1
        self.core.begin_step(self.step)
        self.core.compact(most)
        self.core.copies()
        assert {owner: self.holds.pages(owner).tolist() for owner in self.deadlines} == before

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "holds"):
            return
        assert audit(self.core.layout, self.core.snapshot()) == []
        assert audit_holds(self.holds, self.core) == []
        assert {hold.owner: hold.deadline for hold in self.holds.values()} == self.deadlines
        assert self.holds.next_deadline == min(self.deadlines.values(), default=None)

    def teardown(self) -> None:
        if not hasattr(self, "holds"):
            return
        for handle in self.running:
            self.core.close(handle)
        self.holds.release_where(lambda hold: True)
        assert not len(self.holds)
        assert not any(self.core.snapshot().used)


TestHolds = HoldsMachine.TestCase
TestHolds.settings = machine(40, 0.6)


def test_what_is_here_is_not_received_anew() -> None:
    """Its half-full page stays held, and so cached, whatever others evict."""
    core = create_core(pool_of(4, group(4, 2)))
    holds, first, again = Holds(core), Owner("arrival", "a", 1, 1), Owner("arrival", "a", 1, 2)
    holds.hold_text(first, 9, ints(2, 10, 11))
    missing = holds.receive(first, 1)
    assert missing is not None and len(missing) == 1
    holds.insert(first, 1)
    assert holds.hold_text(again, 9, ints(2, 10)).hit_tokens == 1
    missing = holds.receive(again, 1)
    assert missing is not None and not len(missing)
    alone = core.open(ints(0), "", reuse=False)  # evicts all that nobody holds
    core.close(alone)
    holds.insert(again, 1)
    assert core.peek(ints(2, 999), "") == 1


def test_pages_without_a_text_become_one() -> None:
    core = create_core(pool_of(20, group(4, 2)))
    holds, owner = Holds(core), Owner("alloc", "a", 1, 1)
    assert holds.hold_pages(owner, 9, ints(3)) is not None
    with pytest.raises(ValueError, match="not those of this text"):
        holds.adopt(owner, ints(*range(13)))
    holds.adopt(owner, ints(*range(11)))
    holds.insert(owner, 11)
    assert core.peek(ints(*range(11), 99), "") == 11
    assert len(holds) == 0


def test_no_room_leaves_nothing_behind() -> None:
    core = create_core(pool_of(4, group(4, 2)))
    holds = Holds(core)
    assert holds.hold_pages(Owner("alloc", "a", 1, 1), 9, ints(9)) is None
    owner = Owner("arrival", "a", 1, 2)
    holds.hold_text(owner, 9, ints(*range(40)))
    assert holds.receive(owner, 40) is None
    assert len(holds) == 0 and not core.snapshot().holders
