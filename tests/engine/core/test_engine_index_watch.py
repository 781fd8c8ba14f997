"""Whoever follows an instance's notices knows which prefixes its index has, in every group."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.core.core import EngineCore
from kvell.engine.core.index_watch import Block, BlockChanges, IndexWatch
from kvell.engine.protocol.messages import Cancel, Event
from kvell.engine.protocol.notices import (
    NO_BLOCK,
    BlocksHeld,
    BlocksRemoved,
    BlocksStored,
    IndexNotice,
)
from kvell.engine.requests.block_hashes import BlockHashes, root_digest
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import StepResult
from kvell.memory import GroupKind, LayerSpec, Layout, plan_layout
from kvell.vocabulary import RequestId
from tests.depth import some
from tests.engine.conftest import EOS, make_layout, make_submit
from tests.oracle.core.reference import ReferenceCore
from tests.oracle.index.radix import Node

PAGE_TOKENS = 4
LIMITS = Limits(24, 6, 400, 1000, min_chunk_tokens=4)
KnownBlock = tuple[int, str, tuple[int, ...]]
"""(group, root's digest, tokens of the prefix)."""


def with_states(num_large: int) -> Layout:
    layers = [
        LayerSpec(0, GroupKind.FULL, 1, 8, 2),
        LayerSpec(1, GroupKind.STATE, 0, 0, 2, state_bytes=64),
        LayerSpec(2, GroupKind.STATE, 0, 0, 2, state_bytes=64),
    ]
    large = plan_layout(layers, 1 << 20, page_tokens=PAGE_TOKENS).large_page_bytes
    return plan_layout(layers, large * num_large, page_tokens=PAGE_TOKENS)


class Follower:
    """What a listener makes of notices alone."""

    def __init__(self) -> None:
        self.prefixes: dict[int, tuple[int, ...]] = {NO_BLOCK: ()}
        self.stored: set[tuple[int, int]] = set()
        self.roots: dict[int, str] = {}
        self.sequence = 0

    def follow(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, IndexNotice):
                assert event.sequence == self.sequence
                self.sequence += 1
                for change in event.changes:
                    assert not isinstance(change, BlocksHeld)
                    self.take(change)

    def take(self, change: BlocksStored | BlocksRemoved) -> None:
        keys = {(change.group, block) for block in change.hashes}
        assert len(keys) == len(change.hashes)
        if isinstance(change, BlocksRemoved):
            assert keys <= self.stored
            self.stored -= keys
            return
        assert not keys & self.stored
        self.stored |= keys
        tokens = np.frombuffer(change.tokens, "<i4").tolist()
        assert len(tokens) == len(change.hashes) * change.block_tokens
        size = change.block_tokens
        for at, (parent, block) in enumerate(pairwise((change.parent, *change.hashes))):
            self.roots[block] = change.root
            if parent in self.prefixes:
                prefix = (*self.prefixes[parent], *tokens[at * size : (at + 1) * size])
                assert self.prefixes.setdefault(block, prefix) == prefix

    @property
    def blocks(self) -> set[KnownBlock]:
        return {(group, self.roots[one], self.prefixes[one]) for group, one in self.stored}


class Watched:
    """An engine core over the Python memory core, whose index can be read for comparison."""

    def __init__(self, layout: Layout) -> None:
        self.memory = ReferenceCore(layout)
        self.core = EngineCore(self.memory, LIMITS, frozenset({EOS}))
        self.core.watch_index(lambda: IndexWatch(self.memory))
        self.follower = Follower()

    def step(self) -> None:
        plan = self.core.plan()
        tokens = tuple(7 + plan.step % 2 for work in plan.work if work.samples)
        self.follower.follow(self.core.commit(StepResult(plan.step, tokens)))

    def run(self) -> None:
        for _ in range(400):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("requests are left over")

    def cancel(self, name: str) -> None:
        self.follower.follow(self.core.cancel(Cancel(RequestId(name))))

    def whole(self) -> set[tuple[int, int]]:
        """What is told to somebody who has missed something."""
        (notice,) = self.core.watch_index(lambda: IndexWatch(self.memory))
        assert isinstance(notice, IndexNotice) and notice.is_whole
        assert notice.sequence == self.follower.sequence
        self.follower.sequence += 1
        return {(one.group, block) for one in notice.changes for block in one.hashes}

    def indexed(self) -> set[KnownBlock]:
        """Whole blocks that the index names; states only with all of their pages."""
        pages: dict[KnownBlock, int] = {}
        for group, _, node, (end, _) in self.memory.store.tree.named_pages():
            if end % PAGE_TOKENS == 0:
                name, tokens = _path(node, end)
                key = (group, root_digest(name.partition("/")[2]), tokens)
                pages[key] = pages.get(key, 0) + 1
        groups = self.memory.layout.groups
        return {
            key
            for key, count in pages.items()
            if groups[key[0]].kind is not GroupKind.STATE or count == groups[key[0]].slices
        }


def _path(node: Node | None, end: int) -> tuple[str, tuple[int, ...]]:
    parts: list[list[int]] = []
    name = ""
    while node is not None:
        parts.append(node.tokens.tolist())
        name, node = node.root, node.parent
    tokens = [token for part in reversed(parts) for token in part]
    return name, tuple(tokens[:end])


LAYOUTS = [
    make_layout((0,), 14, page_tokens=PAGE_TOKENS),
    make_layout((0, 9), 14, page_tokens=PAGE_TOKENS),
    make_layout((6,), 10, page_tokens=PAGE_TOKENS),
    with_states(24),
]
prompts = st.builds(
    lambda start, count, tail: [start, *range(10, 10 + count), *[tail] * tail],
    st.integers(1, 2),
    st.integers(0, 30),
    st.integers(1, 6),
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), prompts, st.sampled_from(["", "", "salt"])),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
    ),
    max_size=25,
)


@some()
@given(layout=st.sampled_from(LAYOUTS), story=actions)
def test_a_follower_knows_the_index(layout: Layout, story: list[tuple]) -> None:  # type: ignore[type-arg]
    watched, names = Watched(layout), 0
    for action, *given_ in story:
        if action == "submit":
            prompt, salt = given_
            watched.core.submit(make_submit(f"r{names}", prompt, 3, salt=salt))
            names += 1
        elif action == "step":
            for _ in range(given_[0] if watched.core.has_work else 0):
                if watched.core.has_work:
                    watched.step()
        elif names:
            watched.cancel(f"r{given_[0] % names}")
        if watched.core.has_work:
            watched.step()
            assert watched.follower.blocks == watched.indexed()
    watched.run()
    assert watched.follower.blocks == watched.indexed()
    assert watched.whole() == watched.follower.stored


def test_a_prompt_is_told_as_one_run_and_its_evictions_too() -> None:
    watched = Watched(LAYOUTS[0])
    watched.core.submit(make_submit("a", range(20), 1))
    plan = watched.core.plan()
    events = watched.core.commit(StepResult(plan.step, (7,)))
    (notice,) = [event for event in events if isinstance(event, IndexNotice)]
    (stored,) = notice.changes
    assert isinstance(stored, BlocksStored)
    assert (stored.group, stored.kind, stored.parent) == (0, "full", NO_BLOCK)
    assert (stored.block_tokens, len(stored.hashes), stored.root) == (PAGE_TOKENS, 5, "")
    assert np.frombuffer(stored.tokens, "<i4").tolist() == list(range(20))
    watched.follower.follow(events)
    for number in range(30):
        watched.core.submit(make_submit(f"b{number}", range(100 + number, 140 + number)[:40], 1))
        watched.run()
    assert 0 < len(watched.follower.stored) == len(watched.indexed())
    assert stored.hashes[0] not in {block for _, block in watched.follower.stored}


def test_nothing_is_told_unless_somebody_watches() -> None:
    core = EngineCore(ReferenceCore(LAYOUTS[1]), LIMITS, frozenset({EOS}))
    core.submit(make_submit("a", range(20), 2))
    events = []
    while core.has_work:
        plan = core.plan()
        draws = tuple(7 for work in plan.work if work.samples)
        events += core.commit(StepResult(plan.step, draws))
    assert not any(isinstance(event, IndexNotice) for event in events)


def test_hashes_differ_by_model_root_and_everything_before() -> None:
    def chain(model: str = "", root: str = "") -> BlockHashes:
        return BlockHashes(4, model, root)

    tokens, other = np.arange(12, dtype=np.int32), np.arange(12, dtype=np.int32)
    other[0] = 9
    hashes = {
        chain().up_to(tokens),
        chain("m").up_to(tokens),
        chain("", "m").up_to(tokens),
        chain("m", "r").up_to(tokens),
        chain().up_to(other),
        chain().up_to(tokens[:8]),
    }
    assert len(hashes) == 6
    assert chain().up_to(tokens[:0]) == NO_BLOCK
    grown = chain()
    assert [grown.up_to(tokens[:4]), grown.up_to(tokens)] == [
        chain().up_to(tokens[:4]),
        chain().up_to(tokens),
    ]
    assert grown.up_to(tokens[:8]) == chain().up_to(tokens[:8])


@pytest.mark.parametrize("salt", ["secret", "x" * 200])
def test_a_digest_does_not_hold_the_salt(salt: str) -> None:
    assert root_digest("") == ""
    assert salt not in root_digest(salt) and len(root_digest(salt)) == 16


def test_runs_end_where_another_group_or_branch_begins() -> None:
    changes = BlockChanges(LAYOUTS[1].groups)
    token = b"\1\0\0\0"
    for group, block, parent in [(0, 1, NO_BLOCK), (0, 2, 1), (1, 1, NO_BLOCK), (0, 3, 1)]:
        changes.on_stored(Block(group, block, parent, token, "", 1))
    changes.on_removed(0, 2)
    changes.on_removed(0, 1)
    changes.on_removed(1, 1)
    told = [(change.group, change.hashes) for change in changes.take()]
    assert told == [(0, (1, 2)), (1, (1,)), (0, (3,)), (0, (2, 1)), (1, (1,))]
